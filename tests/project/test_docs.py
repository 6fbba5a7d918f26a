"""The documentation site: built without a warning, complete, and fetching nothing from others."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sphinx.search.en import SearchEnglish
from sphinx.util.inventory import InventoryFile

from tests.project.test_project import PUBLIC as ALL_PUBLIC

ROOT = Path(__file__).parents[2]
# Without what is for builders and needs packages of its own.
PUBLIC = tuple(name for name in ALL_PUBLIC if not name.endswith((".ray", ".testing")))
# What a browser fetches to show a page; a link is only followed when clicked.
FETCHED = {
    "audio",
    "embed",
    "iframe",
    "img",
    "input",
    "link",
    "object",
    "script",
    "source",
    "video",
}


@pytest.mark.campaign
def test_the_site(tmp_path: Path) -> None:
    """Build it once, since that takes seconds, and look at it from all sides."""
    site = built(tmp_path)
    every_page_is_there(site)
    every_public_name_is_in_the_reference(site)
    nothing_is_fetched_from_another_host(site)
    formulas_need_no_script(site)
    search_knows_what_pages_say(site)
    search_finds_what_people_look_for(site)
    the_index_for_models_names_every_page(site)


def built(folder: Path) -> Path:
    # A process of its own: Sphinx changes the interpreter that it runs in.
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    command += ["-d", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder / "html"


def every_page_is_there(site: Path) -> None:
    docs = ROOT / "docs"
    sources = [*docs.glob("*.md"), *docs.glob("[!_]*/*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert len(sources) > 15
    for source in sources:
        home = ROOT if source.suffix == ".ipynb" else docs
        page = site / source.relative_to(home).with_suffix(".html")
        assert page.exists(), "not built"


def every_public_name_is_in_the_reference(site: Path) -> None:
    with (site / "objects.inv").open("rb") as stream:
        inventory = InventoryFile.load(stream, "", lambda base, path: path)
    reference = {name for kind in inventory if kind.startswith("py:") for name in inventory[kind]}
    # A name that several modules hand on has its place in one of them.
    for module in PUBLIC:
        missing = [
            name
            for name in importlib.import_module(module).__all__
            if not any(f"{place}.{name}" in reference for place in PUBLIC)
        ]
        assert not missing, f"not in the reference, of {module}"
        lost = [
            member
            for member, places in public_members(module)
            if not any(f"{place}.{name}" in reference for place in PUBLIC for name in places)
        ]
        assert not lost, f"not in the reference, of {module}"


# With these a recording on disk makes its reductions again, and callbacks begin and end a guard.
INTERNAL = {"recipe", "from_recipe", "begin_guard", "end_guard"}


def public_members(module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield methods and properties, those of mixins too, and where the reference may have them."""
    public = importlib.import_module(module)
    for kind in filter(inspect.isclass, (getattr(public, name) for name in public.__all__)):
        own = [base for base in kind.__mro__ if base.__module__.startswith("scio_recorder")]
        # What overrides another package's method is documented there.
        foreign = {member for base in set(kind.__mro__) - set(own) for member in vars(base)}
        members = {name: value for base in own for name, value in vars(base).items()}
        for member, value in members.items():
            if member.startswith("_") or member in foreign | INTERNAL:
                continue
            if is_callable(value):
                yield f"{kind.__name__}.{member}", [f"{base.__name__}.{member}" for base in own]


def is_callable(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)


class _Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in FETCHED:
            values = [
                value or "" for name, value in attrs if name in ("src", "srcset", "href", "data")
            ]
            self.addresses += values


def fetched(page: Path) -> Iterator[str]:
    parser = _Fetched()
    parser.feed(page.read_text(encoding="utf-8"))
    yield from parser.addresses


def nothing_is_fetched_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    addresses = {address for page in pages for address in fetched(page)}
    assert any(address.endswith(".js") for address in addresses), "the parser sees scripts"
    assert not [address for address in addresses if "//" in address.partition("?")[0]]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "url(http" not in text.replace('"', "").replace("'", "")
        assert "@import" not in text


def formulas_need_no_script(site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (site / "notebooks").glob("*.html")]
    assert any("<math" in page for page in pages)
    assert not any("MathJax" in page for page in pages)


def search_knows_what_pages_say(site: Path) -> None:
    script = (site / "_static" / "page_texts.js").read_text(encoding="utf-8")
    texts = json.loads(script.removeprefix("PAGE_TEXTS = ").removesuffix(";"))
    assert "Mahalanobis distance" in texts["how-to/out-of-distribution.html"]
    assert "run to its end. extract stops it" in texts["how-to/stopping-early.html"]
    assert "rnet.extract(torch.randn(8, 16))" in texts["how-to/stopping-early.html"]
    assert not [page for page, text in texts.items() if "<p>" in text or "¶" in text]
    search = (site / "search.html").read_text(encoding="utf-8")
    assert "search_in_files.js" in search


def search_finds_what_people_look_for(site: Path) -> None:
    script = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))
    stem = SearchEnglish({}).stem
    for words in ("attention", "logit lens", "TransformerLens", "nnsight", "hooks", "embedding"):
        for word in words.lower().split():
            assert {stem(word)} & (index["terms"].keys() | index["titleterms"].keys()), word
    for words in ("logit lens", "TransformerLens", "hooks", "captum", "torchlens"):
        assert any(words.lower() in title.lower() for title in index["alltitles"]), words
    search_answers_questions_first(index)


# What users ask, and the page that answers.
QUESTIONS = {
    "7B": "how-to/a-7b-model-on-one-gpu",
    "CLIP embeddings": "how-to/timm-features",
    "CLS token": "how-to/out-of-distribution",
    "CUDA out of memory": "how-to/a-7b-model-on-one-gpu",
    "DDP": "how-to/several-processes",
    "FSDP": "how-to/sharded",
    "GPU out of memory": "how-to/a-7b-model-on-one-gpu",
    "Grad-CAM": "how-to/feature-maps",
    "KV cache": "how-to/generation",
    "LoRA": "how-to/adapters",
    "NaN loss": "how-to/first-nan",
    "SAE training": "how-to/sparse-autoencoders",
    "SAE": "how-to/sparse-autoencoders",
    "activation patching": "how-to/patching",
    "attention weights": "how-to/attention",
    "concept vector": "how-to/steering-vector",
    "dead neurons": "how-to/dead-and-exploding-units",
    "drift": "how-to/ood-service",
    "energy score": "how-to/out-of-distribution",
    "feature extraction": "how-to/timm-features",
    "forward hook": "how-to/coming-from-hooks",
    "gradient checkpointing": "subjects/recompute",
    "hidden states": "subjects/integrations",
    "hook not called": "how-to/coming-from-hooks",
    "in-place": "how-to/coming-from-hooks",
    "induction head": "how-to/attention",
    "integrated gradients": "how-to/coming-from-captum",
    "last token": "how-to/left-padding",
    "layer names": "tutorial/five-minutes",
    "memory leak": "how-to/coming-from-hooks",
    "model summary": "subjects/seeing",
    "multiple GPUs": "how-to/quantised-and-device-map",
    "neuron ablation": "subjects/postprocessing",
    "ood detection": "how-to/out-of-distribution",
    "output shape": "tutorial/five-minutes",
    "probe": "how-to/probes",
    "quantization": "how-to/quantised-and-device-map",
    "residual stream": "how-to/residual-stream",
    "resume": "subjects/collect",
    "save activations": "subjects/collect",
    "sentence embeddings": "how-to/padded-batches",
    "steering vector": "how-to/steering-vector",
    "stop the forward": "how-to/stopping-early",
    "torch.compile": "how-to/compiling",
    "vision transformer": "how-to/feature-maps",
    "which layer is wrong": "how-to/which-layer-of-my-port",
}


def search_answers_questions_first(index: dict[str, Any]) -> None:
    """Each question is in the index, whose entries come before all other results.

    Sphinx's script shows an entry that contains the words and is at most twice as long.
    """
    entries = index["indexentries"]
    words_of = tomllib.loads((ROOT / "docs" / "search.toml").read_text(encoding="utf-8"))
    assert set(words_of) <= set(index["docnames"])
    for question, page in QUESTIONS.items():
        words = question.lower()
        matching = [e for e in entries if words in e.lower() and len(e) <= 2 * len(words)]
        pages = {
            index["docnames"][number]
            for e in matching
            for number, _, is_main in entries[e]
            if is_main
        }
        assert page in pages, question
        assert len(pages) <= 3, question


def the_index_for_models_names_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# scio-recorder\n\n> scio-recorder is a PyTorch library")
    named = set(re.findall(r"^- \[.+\]\((.+)\): \S", text, re.MULTILINE))
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert pages - named == {"index.html", "genindex.html", "search.html", "py-modindex.html"}
    assert named <= pages

"""How a comparison is printed, tabulated, drawn and put on a page."""

from __future__ import annotations

import copy
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich
import torch
from rich.console import Console
from torch import Tensor, nn

from scio_recorder import ComparisonError, Recorder, RecordingError, compare
from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.reductions import Digest
from tests.zoo.base import Net

WORDS = ("h", "1", "up", "act")
SAMPLES = torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(0)).split(4)


def block() -> Net:
    return Net(lambda net, x: x + net.act(net.up(x)), up=nn.Linear(6, 6), act=nn.Tanh())


def forward(net: Any, x: Tensor) -> Any:
    for inner in net.h:
        x = inner(x)
    return net.head(x)


def make_net() -> Net:
    torch.manual_seed(0)
    blocks = nn.ModuleList(block() for _ in range(3))
    return Net(forward, h=blocks, head=nn.Linear(6, 2)).eval()


def spoilt(net: Net, by: float = 1e-3) -> Net:
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.h[1].up.bias[4] += by
    return other


def recorder(net: nn.Module) -> Recorder:
    return Recorder(net, input_size=(2, 3, 6))


def compared(net: Net, other: Net, **others: Any) -> Difference:
    return compare(recorder(net), recorder(other), SAMPLES, progress=False, **others)


@pytest.fixture(scope="module")
def difference() -> Difference:
    net = make_net()
    return compared(net, spoilt(net))


@pytest.fixture(scope="module")
def equal() -> Difference:
    net = make_net()
    return compared(net, copy.deepcopy(net))


def outputs(net: Net, name: str) -> Tensor:
    found: list[Tensor] = []
    handle = net.get_submodule(name).register_forward_hook(lambda *call: found.append(call[2]))
    with torch.no_grad():
        for batch in SAMPLES:
            net(batch)
    handle.remove()
    return torch.cat(found)


def test_the_first_difference_is_said_in_a_sentence(difference: Difference) -> None:
    net = make_net()
    reference, candidate = (outputs(one, "h.1.up")[0, 0, 4].item() for one in (net, spoilt(net)))
    said = str(difference).splitlines()[0]
    start = "First difference: 3-3 (h.1.up), sample 0, index (0, 4): "
    assert said == f"{start}{reference:.4g} -> {candidate:.4g}; its inputs are equal."


def test_close_numbers_are_told_apart() -> None:
    net = make_net()
    said = str(compared(net, spoilt(net, 1e-6))).splitlines()[0]
    reference, candidate = said.split("(0, 4): ")[1].split(";")[0].split(" -> ")
    assert reference != candidate
    assert float(reference) == pytest.approx(float(candidate), abs=2e-6)


def test_what_is_printed(difference: Difference, equal: Difference) -> None:
    lines = str(difference).splitlines()
    assert lines[1].split() == [
        *("Label", "Name", "Differs", "Inputs", "Max", "abs", "Rel.", "error"),
        *("Cosine", "Different"),
    ]
    rows = {line.split()[1]: line.split() for line in lines[2:-1]}
    assert list(rows)[:3] == ["h.0.up", "h.0.act", "h.0"]
    assert rows["h.0.up"][2:] == ["no", "equal", "0", "0", "1", "0"]
    assert rows["h.1.up"][2:4] == ["first", "equal"]
    assert rows["h.1.act"][2:4] == ["yes", "differ"]
    assert rows["(root)"][:2] == ["0-1", "(root)"]
    net = make_net()
    reference, candidate = (outputs(one, "h.1.act").double() for one in (net, spoilt(net)))
    gap = candidate - reference
    assert rows["h.1.act"][4:6] == [
        f"{gap.abs().max().item():.4g}",
        f"{(gap.norm() / reference.norm()).item():.4g}",
    ]
    assert rows["h.1.act"][-1] == str(int((gap != 0).sum()))
    assert lines[-1] == "8 of 11 layers differ, in 9 samples."
    assert str(equal).splitlines()[0] == "No difference in 11 layers, 9 samples."
    assert "differ" not in str(equal).splitlines()[-1]


def test_a_narrow_terminal_cuts_names_only(difference: Difference) -> None:
    console = Console(width=76, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(difference)
    console.file.close()
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 76
    rows = [line for line in text.splitlines() if line.startswith("3-4")]
    assert "yes" in rows[0]
    assert "differ" in rows[0]


def test_rich_marks_the_first(difference: Difference) -> None:
    console = Console(width=120, force_terminal=True, color_system="standard", record=True)
    with console.capture() as capture:
        rich.print(difference, file=console.file)
        console.print(difference)
    bold = [line for line in capture.get().splitlines() if line.startswith("\x1b[1m")]
    assert [line for line in bold if "h.1.up" in line]
    assert not [line for line in bold if "h.0.up" in line]


def test_unknown_inputs_come_with_advice() -> None:
    net = make_net()
    recordings = []
    for one in (net, spoilt(net)):
        rnet = recorder(one)
        rnet.record("*")
        recordings.append(rnet.collect(SAMPLES, reduce=Digest()))
    text = str(compare(*recordings))
    assert "its inputs are not known" in text
    assert "inputs=True" in text
    row = next(line for line in text.splitlines() if "h.1.act" in line)
    # Of digests nothing but the number of samples that differ is known.
    assert "nan" not in text
    assert row.split()[-2:] == ["?", "9"]


def test_inputs_that_differ_already_come_with_advice() -> None:
    net = make_net()
    one, two = recorder(net), recorder(spoilt(net))
    one.record("h.2.act", "head")
    text = str(compare(one, two, SAMPLES))
    assert "some of its inputs differ already" in text.splitlines()[0]
    assert "record more" in text


def test_what_is_not_compared_is_said() -> None:
    net, other = make_net(), make_net()
    other.foot = other.head
    del other.head
    other.forward = lambda x: other.foot(other.h[2](other.h[1](other.h[0](x))))  # type: ignore[method-assign]  # a net of other names
    text = str(compared(net, other))
    assert "1 of the reference, head" in text
    assert "1 of the candidate, foot" in text
    assert "foot" not in str(compared(net, other, match={"head": "foot"})).splitlines()[-1]
    assert "Candidate" in str(compared(net, other, match={"head": "foot"}))


def test_the_last_line_of_a_cell_is_short(difference: Difference, equal: Difference) -> None:
    assert repr(difference) == f"<{str(difference).splitlines()[0]}>"
    assert repr(equal) == "<No difference in 11 layers, 9 samples.>"


def test_tolerances_are_said() -> None:
    net = make_net()
    text = str(compared(net, spoilt(net, 1e-6), atol=1e-2))
    assert text.splitlines()[0] == "No difference in 11 layers, 9 samples beyond atol=0.01."


def test_the_frame_is_what_was_found(difference: Difference) -> None:
    frame = difference.to_frame()
    assert list(frame.index) == [str(label) for label in difference]
    for label, found in difference.items():
        row = frame.loc[str(label)]
        for name in ("name", "max_abs", "relative_error", "num_different", "first_sample_id"):
            assert row[name] == getattr(found, name)
        assert row["inputs_equal"] is found.inputs_equal
        assert row["differs"] == found.differs
    assert frame["max_abs"].dtype == float
    assert frame["differs"].dtype == bool
    assert frame.loc["3-3", "type"] == "Linear"


def test_the_figure_has_every_layer(difference: Difference, equal: Difference) -> None:
    axis = difference.plot().axes[0]
    names = [tick.get_text() for tick in axis.get_xticklabels()]
    assert names == [found.name or "(root)" for found in difference.values()]
    errors = np.array([found.relative_error for found in difference.values()])
    drawn = axis.lines[1].get_ydata()
    assert np.allclose(drawn[errors > 0], errors[errors > 0])
    assert (drawn[errors == 0] < errors[errors > 0].min()).all()
    assert axis.get_yscale() == "log"
    first = next(line for line in axis.lines if line.get_label() == "first difference")
    assert names[int(first.get_xdata()[0])] == "h.1.up"
    assert len(equal.plot().axes[0].get_xticklabels()) == len(equal)
    assert difference.plot("max_abs").axes[0].get_ylabel() == "max abs"
    with pytest.raises(ComparisonError, match="share_different"):
        difference.plot("error")  # type: ignore[arg-type]  # that is the mistake


def test_infinities_and_digests_are_drawn() -> None:
    net = make_net()
    broken = copy.deepcopy(net)
    with torch.no_grad():
        broken.head.bias[0] = math.inf
    difference = compared(net, broken)
    axis = difference.plot().axes[0]
    assert "no finite number" in [text.get_text() for text in axis.texts]
    heights = dict(zip((one.name for one in difference.values()), axis.lines[2].get_ydata()))  # noqa: B905
    assert heights["head"] > 10 * heights["h.2"]
    rnet = recorder(net)
    rnet.record("*")
    digests = rnet.collect(SAMPLES, reduce=Digest())
    axis = compare(digests, recorder(spoilt(net)), SAMPLES).plot().axes[0]
    assert axis.get_ylabel() == "share different"


class Page(HTMLParser):
    """The texts of a page's tree, by the label in front; the table's rows."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.remarks: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self._label, self._kind = "", ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        kind = given.get("class") or ""
        if tag == "tr" and "id" in given:
            self.rows.append([])
        for name in ("sn-label", "sn-remark"):
            if name in kind:
                self._kind = name
        if tag in ("th", "td") and self.rows:
            self.rows[-1].append("")
            self._kind = "cell"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("table", "td", "tr"):
            self._kind = ""

    def handle_data(self, data: str) -> None:
        if self._kind == "sn-label":
            self._label, self._kind = data, ""
        elif self._kind == "sn-remark":
            self.remarks[self._label], self._kind = data, ""
        elif self._kind == "cell":
            self.rows[-1][-1] += data


def page_of(difference: Difference, tmp_path: Path) -> Page:
    path = difference.report(tmp_path / "page.html")
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_has_every_difference_in_the_tree(difference: Difference, tmp_path: Path) -> None:
    page = page_of(difference, tmp_path)
    assert list(page.remarks) == [
        str(layer.label) for layer in difference.architecture.values() if layer.executed
    ]
    for label, found in difference.items():
        remark = page.remarks[str(label)]
        assert remark.startswith("first: ") == (found.name == "h.1.up")
        assert (remark == "equal") == (not found.differs)
        if found.differs:
            assert f"max abs {found.max_abs:.4g}" in remark


def test_the_page_has_the_first_values(difference: Difference, tmp_path: Path) -> None:
    html = difference.report(tmp_path / "page.html").read_text("utf-8")
    assert difference.sentence.replace(">", "&gt;") in html
    net, first = make_net(), difference.first
    assert first.index is not None
    index = (int(first.sample_id or 0), *first.index)
    assert first.reference == outputs(net, "h.1.up")[index].item()
    assert first.candidate == outputs(spoilt(net), "h.1.up")[index].item()


def test_the_page_has_a_table_in_order_of_return(difference: Difference, tmp_path: Path) -> None:
    page = page_of(difference, tmp_path)
    assert [row[0] for row in page.rows] == [str(label) for label in difference]
    first = next(row for row in page.rows if row[1] == "first")
    assert first[2:5] == ["h.1.up", "Linear", "equal"]
    assert first[9] == "27"


def headings(page: str) -> list[str]:
    return re.findall(r"<button[^>]*>([^<]*)</button>", page.partition("<thead>")[2])


@pytest.mark.parametrize(
    ("by", "figures"),
    [
        ("digests", ["Different", "First sample"]),
        ("values", ["Max abs", "Max rel", "Rel. error", "Cosine", "Different", "First sample"]),
    ],
)
def test_the_page_has_no_column_without_a_value(
    by: str, figures: list[str], tmp_path: Path
) -> None:
    net = make_net()
    rnet, other = recorder(net), recorder(spoilt(net))
    rnet.record("*")
    reference = rnet.collect(SAMPLES, reduce=Digest()) if by == "digests" else rnet
    page = compare(reference, other, SAMPLES).report(tmp_path / "page.html").read_text("utf-8")
    common = ["Layer", "Differs", "Name", "Type", "Inputs", *figures]
    assert headings(page) == common
    for row in Page(page).rows:
        assert len(row) == len(headings(page))


@pytest.mark.parametrize(("bias", "alarms"), [(1.0, 0), (torch.inf, 1)])
def test_an_infinite_difference_stands_out_and_an_infinite_quotient_does_not(
    bias: float, alarms: int, tmp_path: Path
) -> None:
    nets = [nn.Linear(2, 1, bias=True).eval() for _ in range(2)]
    for net, value in zip(nets, (0.0, bias), strict=True):
        with torch.no_grad():
            net.weight.zero_()
            net.bias.fill_(value)
    difference = compare(*(Recorder(net, input_size=(1, 2)) for net in nets), [torch.ones(1, 2)])
    assert math.isinf(difference["0-1"].max_rel)
    assert math.isinf(difference["0-1"].max_abs) is (alarms == 1)
    html = difference.report(tmp_path / "page.html").read_text("utf-8")
    cells = re.findall(r'<td class="number"[^>]*>(<span class="alarm">)?inf<', html)
    assert sum(map(bool, cells)) == alarms
    assert not all(cells)


def test_names_do_nothing_to_a_page(tmp_path: Path) -> None:
    nets = [nn.Sequential() for _ in range(2)]
    for number, net in enumerate(nets):
        net.add_module("<script>alert(1)</script>", nn.Linear(3, 3))
        net.add_module(f"\x1b[31m{number}", nn.ReLU())
    recorders = [Recorder(net, input_size=(1, 3)) for net in nets]
    difference = compare(*recorders, [torch.randn(4, 3)])
    html = difference.report(tmp_path / "page.html", title="<b>").read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "<script>alert" not in difference._repr_html_()
    assert "<h1>&lt;b&gt;</h1>" in html
    assert "://" not in html
    assert "\x1b" not in str(difference)


def test_bad_paths_and_titles(difference: Difference, tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match=r"page\.html"):
        difference.report("")
    with pytest.raises(ComparisonError, match="heading"):
        difference.report(tmp_path / "page.html", title=3)  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(RecordingError):
        difference.report(tmp_path / "missing" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_shapes_that_differ_are_an_error_of_the_layer(tmp_path: Path) -> None:
    net, other = make_net(), make_net()
    other.head = nn.Linear(6, 3)
    difference = compared(net, other)
    error = difference["head"].error
    assert error is not None
    assert error in str(difference).splitlines()[0]
    assert error in page_of(difference, tmp_path).remarks["1-2"]
    assert "no finite number" in [text.get_text() for text in difference.plot().axes[0].texts]
    assert difference.to_frame().loc["1-2", "error"] == error


def test_one_layer_and_one_sample_are_no_plural() -> None:
    one = Recorder(nn.Identity(), input_size=(1, 2))
    text = str(compare(one, one, [torch.ones(1, 2)]))
    assert text.splitlines()[0] == "No difference in 1 layer, 1 sample."

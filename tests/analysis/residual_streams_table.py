"""Writes what is found of the residual stream in each causal language model of transformers.

``python -m tests.analysis.residual_streams_table > docs/reference/residual-streams.md``
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from textwrap import shorten

import torch
import transformers

from scio_recorder import LayerNotFoundError, Recorder
from tests.analysis.language_models import KINDS, example, make

HEAD = """\
# Residual streams of transformers' language models

What [`rnet.residual_stream()`](../how-to/residual-stream.md) finds in each causal language model
of transformers {version}, made small, with random weights.
`python -m tests.analysis.residual_streams_table` writes this page, and tests compare each stream
with plain hooks and with sums by hand.

{counts}. *All* means that each branch of each block has a name, and the last norm and the logits.

| class (model type) | names of blocks, or the reason |
| --- | --- |"""


def judged(kind: str) -> tuple[str, str]:
    """Return what was found, in a word, and what it was."""
    try:
        net = make(kind)
        with torch.no_grad():
            net(**example())
    except Exception as error:
        return "not made", f"not made: {shortened(str(error))}"
    rnet = Recorder(net, input_data=example(), force_static_flow=False)
    try:
        stream = rnet.residual_stream()
    except LayerNotFoundError as error:
        reason = str(error).removeprefix("no residual stream was found: ")
        return "refused", f"refused: {shortened(reason)}"
    reasons = {
        name.rpartition(".")[2]: entry
        for name, entry in stream.entries.items()
        if isinstance(entry, str) and ("several" in entry or "structure" in entry)
    }
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in stream if "." in name))
    has_all = not reasons and {"final_norm", "logits"} <= {*stream}
    text = f"{'all' if has_all else 'in part'}: {', '.join(names)}"
    parts = [text, *(f"`.{name}`: {reason}" for name, reason in reasons.items())]
    return ("all" if has_all else "in part"), "; ".join(parts)


def shortened(text: str) -> str:
    """Return a reason in one line, without names of files and what a table can't hold."""
    line = re.sub(r" \(\w+\.py:\d+\)", "", text).replace("|", "/")
    line = shorten(line, 400, placeholder=" ...")
    # Names as code, which breaks between their parts in a narrow column.
    return re.sub(
        r"(?<![`\w])\w+(\.\w+)+(/\w+:\d+)?", r"`\g<0>`", shorten(line, 400, placeholder=" ...")
    )


def main() -> None:
    """Print the page."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows, counts = [], Counter[str]()
    for kind, name in KINDS.items():
        word, text = judged(kind)
        counts[word] += 1
        rows.append(f"| `{name}` ({kind}) | {text} |")
    tried = (
        f"Of {len(rows)} classes, {counts['all']} have all names and {counts['in part']} a part of "
        f"them, {counts['refused']} are refused, and {counts['not made']} could not be made small"
    )
    print(HEAD.format(version=transformers.__version__, counts=tried))
    print("\n".join(rows))


if __name__ == "__main__":
    main()

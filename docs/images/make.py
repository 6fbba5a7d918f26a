"""Make the pictures of the pages: ``python docs/images/make.py`` in a clone of the repository.

Needs scikit-learn and Debian's packages ``chromium`` and ``fonts-dejavu-core``. A small net is
trained on handwritten digits, its layers are recorded over the test images, and what a user sees of
it is drawn: the table that ``rich.print`` prints, and the report page. Then the net is compared
with one of which some weights were changed by a thousandth, and with one that was trained again.
"""

from __future__ import annotations

import copy
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from scio_recorder import Recorder, compare, similarity
from scio_recorder.command_line.demo import KNOWN, digit_net, load_digits, train

HERE = Path(__file__).parent
# Little more than that of the column of the site, so that letters stay readable.
WIDTH = 800


def main() -> None:
    """Write the pictures beside this file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    net = digit_net(KNOWN)
    train(net, digits.train, epochs=5)
    rnet = Recorder(net, input_size=(1, 1, 8, 8))
    rnet.record("stem.0", "stem.2", "body.2", "embed", "relu", "classify")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table.svg")
        table.write_text(drawn(rnet), encoding="utf-8")
        photograph(table, HERE / "architecture.png", width=826, height=455)
        recording = rnet.collect(digits.test.images.split(64))
        page = recording.report(
            f"{folder}/page.html", title="Digits: what the test images do"
        )
        photograph(page, HERE / "report.png", width=WIDTH, height=1338)
        other = copy.deepcopy(net)
        other.body[0].weight.data[3, 1] *= 1.001
        recorders = [Recorder(one, input_size=(1, 1, 8, 8)) for one in (net, other)]
        difference = compare(*recorders, digits.test.images.split(64))
        difference.plot().savefig(HERE / "difference.png", dpi=110)
        page = difference.report(
            f"{folder}/difference.html", title="Digits: a weight was changed"
        )
        photograph(page, HERE / "difference-page.png", width=WIDTH, height=1150)
    again = digit_net(KNOWN)
    train(again, digits.train, epochs=5)
    recordings = []
    for one in (net, again):
        recorder = Recorder(one, input_size=(1, 1, 8, 8))
        recorder.record("*")
        recordings.append(recorder.collect(digits.test.images.split(64)))
    similarity(*recordings).plot().savefig(HERE / "similarity.png", dpi=90)


def drawn(rnet: Recorder) -> str:
    """Return the table as a picture of a terminal."""
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=64, file=nowhere, force_terminal=True)
        console.print(rnet)
        svg = console.export_svg(title="rich.print(rnet)")
    # Its font would be fetched from another host.
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "DejaVu Sans Mono"
    )


def photograph(page: Path, picture: Path, *, width: int, height: int) -> None:
    """Save what a browser shows of a page."""
    command = ["chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars"]
    command += ["--virtual-time-budget=2000", f"--window-size={width},{height}"]
    command += [f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()

"""Make the pictures of the gallery: ``python docs/images/gallery.py`` in a clone of the repository.

Each is a figure that a notebook holds, made smaller. The notebook begins with it.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
# Which figure of each notebook says most about it.
FIGURES = {
    "changing_features": 1,
    "find_the_bug": 0,
    "finding_features": 0,
    "first_look": 0,
    "looking_at_attention": 0,
    "ood_detection": 1,
    "patching_gpt2": 0,
    "steering_generation": 0,
    "watching_training": 2,
    "where_did_the_nan_come_from": 1,
}


def main() -> None:
    """Write the pictures into the folder ``gallery`` beside this file."""
    (HERE / "gallery").mkdir(exist_ok=True)
    for name, number in FIGURES.items():
        picture = Image.open(io.BytesIO(figures(name)[number])).convert("RGB")
        picture.thumbnail((640, 640))
        picture.quantize(64).save(HERE / "gallery" / f"{name}.png", optimize=True)


def figures(name: str) -> list[bytes]:
    """Return the pictures that a notebook holds, in order."""
    notebook = json.loads(
        (HERE.parents[1] / "notebooks" / f"{name}.ipynb").read_text("utf-8")
    )
    outputs = [
        output for cell in notebook["cells"] for output in cell.get("outputs", ())
    ]
    data = [output.get("data", {}) for output in outputs]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


if __name__ == "__main__":
    main()

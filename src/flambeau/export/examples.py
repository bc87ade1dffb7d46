"""The example in an export: ten lines that classify image files without flambeau or the training code."""

_HEAD = '''"""Classify image files: python {name} photo.jpg ...; needs numpy, pillow and {needs}."""

import sys
from pathlib import Path

{imports}from preprocess import Preprocessing

here = Path(__file__).parent
preprocessing = Preprocessing(here)
{load}
for file in sys.argv[1:]:
    pixels, full_size = preprocessing.read_image(file)
    {call}
    best = probabilities.argmax()
    print(f"{{file}}: {{preprocessing.classes[best]}} {{probabilities[best]:.6f}}")
'''

_OF_TORCH = "model({pixels}, {size})[1][0]".format(
    pixels="torch.from_numpy(pixels[None].copy())", size="torch.from_numpy(full_size)"
)

_PARTS = {
    "onnx": {
        "needs": "onnxruntime",
        "imports": "import onnxruntime\n",
        "load": 'session = onnxruntime.InferenceSession(here / "model.onnx")',
        "call": 'given = {"pixels": pixels[None], "full_size": full_size}\n'
        '    [[probabilities]] = session.run(["probabilities"], given)',
    },
    "torch-export": {
        "needs": "torch",
        "imports": "import torch\n",
        "load": 'model = torch.export.load(here / "model.pt2").module()',
        "call": f"probabilities = {_OF_TORCH}",
    },
    "aoti": {
        "needs": "torch",
        "imports": "import torch\n",
        "load": 'model = torch._inductor.aoti_load_package(str(here / "model.aoti.pt2"))',
        "call": f"probabilities = {_OF_TORCH}",
    },
}


def example_of(format_name: str) -> str:
    """The text of example.py for a format."""
    return _HEAD.format(name="example.py", **_PARTS[format_name])

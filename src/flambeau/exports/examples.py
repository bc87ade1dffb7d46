"""example.py of an export: ten lines that predict on image files without flambeau or the training code."""

from flambeau.trainer.parts.model import OWN_MODELS
from flambeau.trainer.prediction.trained_model import Trained

_HEAD = '''"""Predict on image files: python {name} photo.jpg ...; needs numpy, pillow and {needs}."""

import sys
from pathlib import Path

{imports}from preprocess import Preprocessing

here = Path(__file__).parent
preprocessing = Preprocessing(here)
{load}
for file in sys.argv[1:]:
    pixels, full_size = preprocessing.read_image(file)
    {call}
{answer}'''

_OF_TORCH = "model({pixels}, {size})[1][0]".format(
    pixels="torch.from_numpy(pixels[None].copy())", size="torch.from_numpy(full_size)"
)

_PARTS = {
    "onnx": {
        "needs": "onnxruntime",
        "imports": "import onnxruntime\n",
        "load": 'session = onnxruntime.InferenceSession(here / "model.onnx")',
        "call": 'given = {"pixels": pixels[None], "full_size": full_size}\n'
        '    [[{decoded}]] = session.run(["{decoded}"], given)',
    },
    "torch-export": {
        "needs": "torch",
        "imports": "import torch\n",
        "load": 'model = torch.export.load(here / "model.pt2").module()',
        "call": f"{{decoded}} = {_OF_TORCH}",
    },
    "aoti": {
        "needs": "torch",
        "imports": "import torch\n",
        "load": 'model = torch._inductor.aoti_load_package(str(here / "model.aoti.pt2"))',
        "call": f"{{decoded}} = {_OF_TORCH}",
    },
}


def example_of(format_name: str, trained: Trained, quantize: str | None) -> str:
    """The text of example.py for a format."""
    task = trained.facts.task
    if format_name != "safetensors":
        parts = dict(_PARTS[format_name])
        parts["call"] = parts["call"].replace("{decoded}", task.decoded)
        return _HEAD.format(name="example.py", answer=task.example_lines, **parts)
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(quantize or "", "float32")
    packages, (model_import, construction) = _construction(trained)
    return _HEAD.format(
        name="example.py",
        needs=f"torch, safetensors{packages}",
        imports=f"import torch\n{model_import}\nfrom safetensors.torch import load_file\n",
        load=f"model = {construction}.to(torch.{dtype})\n"
        'model.load_state_dict(load_file(here / "model.safetensors"))\nmodel.eval().requires_grad_(False)',
        call="x = preprocessing.normalize(preprocessing.prepare(pixels, full_size))\n"
        f"    logits = model(torch.from_numpy(x).to(torch.{dtype}))[0].float()\n"
        f"    {task.decoded} = {task.of_logits}",
        answer=task.example_lines,
    )


def _construction(trained: Trained) -> tuple[str, tuple[str, str]]:
    """The packages that the model's class needs, and its import and construction."""
    name = trained.settings.model
    facts = trained.facts
    classes = len(facts.classes)
    channels = facts.channels
    if name in OWN_MODELS:
        recipe, kind, own_arguments = OWN_MODELS[name]
        named = "".join(f", {key}={value}" for key, value in own_arguments.items())
        call = f"{kind}({channels}, {classes}{named})"
        return "", (f"from {recipe} import {kind}", call)
    if name.startswith("torchvision:"):
        known = name.removeprefix("torchvision:").partition(".")[0]
        more = ""
        if known in ("googlenet", "inception_v3"):
            more = f", aux_logits=False, transform_input={trained.settings.pretrained}"
        call = f'torchvision.models.get_model("{known}", num_classes={classes}{more})'
        return ", torchvision", ("import torchvision", call)
    import timm

    default = timm.get_pretrained_cfg(name)
    sized = default is not None and default.fixed_input_size
    more = f", img_size={trained.settings.image_size}" if sized else ""
    call = f'timm.create_model("{name}", num_classes={classes}, in_chans={channels}{more})'
    return ", timm", ("import timm", call)

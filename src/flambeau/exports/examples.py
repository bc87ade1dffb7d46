"""example.py of an export: ten lines that predict on image files without flambeau or the training code."""

from torch import nn

from flambeau.exports.steps import ExportPlan
from flambeau.trainer.parts.model import OWN_MODELS
from flambeau.trainer.prediction.classify_files import sets_of
from flambeau.trainer.prediction.ensemble import Model
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
        '    {answer} = session.run(["{answer}"], given)[0][0]',
    },
    "torch-export": {
        "needs": "torch",
        "imports": "import torch\n",
        "load": 'model = torch.export.load(here / "model.pt2").module()',
        "call": f"{{answer}} = {_OF_TORCH}",
    },
    "aoti": {
        "needs": "torch",
        "imports": "import torch\n",
        "load": 'model = torch._inductor.aoti_load_package(str(here / "model.aoti.pt2"))',
        "call": f"{{answer}} = {_OF_TORCH}",
    },
}


_SETS = """\
    print("  set:", ", ".join(preprocessing.set_of(probabilities.tolist())) or "no class")
"""


def example_of(plan: ExportPlan, trained: Model) -> str:
    format_name = plan.format
    quantize = plan.quantize
    words = trained.facts.task.export_words
    has_sets = sets_of(trained) is not None and not plan.changes_answers
    answer = words.example_lines + _SETS * has_sets
    if format_name != "safetensors":
        parts = dict(_PARTS[format_name])
        parts["call"] = parts["call"].replace("{answer}", words.answer)
        return _HEAD.format(name="example.py", answer=answer, **parts)
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(quantize or "", "float32")
    assert isinstance(trained, Trained)  # several runs have no class
    packages, (model_import, construction) = _construction(trained)
    return _HEAD.format(
        name="example.py",
        needs=f"torch, safetensors{packages}",
        imports=f"import torch\n{model_import}\nfrom safetensors.torch import load_file\n",
        load=f"model = {construction}.to(torch.{dtype})\n"
        'model.load_state_dict(load_file(here / "model.safetensors"))\nmodel.eval().requires_grad_(False)',
        call="x = preprocessing.normalize(preprocessing.prepare(pixels, full_size))\n"
        f"    logits = model(torch.from_numpy(x).to(torch.{dtype}))[0].float()\n"
        f"    {words.answer} = {_of_logits(trained)}",
        answer=answer,
    )


def _of_logits(trained: Trained) -> str:
    """What makes the answer of logits, which the file of weights alone leaves as they are."""
    text = trained.facts.task.export_words.of_logits
    if trained.calibration is None:
        return text
    return text.replace("logits", f"(logits / {trained.calibration.temperature!r})", 1)


def needs_own_class(trained: Model) -> bool:
    """Whether the class of the model is in the file pixel_models.py, which goes beside the example."""
    return trained.facts.task.per_pixel and not trained.settings.model.startswith("smp:")


def _pixel_construction(trained: Trained) -> tuple[str, tuple[str, str]]:
    """As `_construction`, of a model with logits for each pixel."""
    name = trained.settings.model
    classes = len(trained.facts.classes)
    channels = trained.facts.channels
    if name.startswith("smp:"):
        kind, _, encoder = name.removeprefix("smp:").partition("/")
        call = (
            f'segmentation_models_pytorch.create_model("{kind}", "{encoder or "resnet34"}", None, '
            f"in_channels={channels}, classes={classes})"
        )
        return ", segmentation-models-pytorch", ("import segmentation_models_pytorch", call)
    if name.startswith("torchvision:"):
        known = name.removeprefix("torchvision:").partition(".")[0]
        made = (
            f'torchvision.models.get_model("{known}", weights=None, weights_backbone=None, '
            f"num_classes={classes})"
        )
        imports = "import torchvision\nfrom pixel_models import MainOutput"
        other = "" if channels == 3 else _other_first_layer(trained.model)
        return ", torchvision", (imports, f"MainOutput({made}){other}")
    encoder = (
        f'timm.create_model("{name}", in_chans={channels}, features_only=True{_sized(trained)})'
    )
    size = trained.settings.image_size
    call = f"PyramidSegmenter({encoder}, {classes}, image_size={size})"
    return ", timm", ("import timm\nfrom pixel_models import PyramidSegmenter", call)


def _sized(trained: Trained) -> str:
    """The argument of timm for a model that is made for one size."""
    import timm

    default = timm.get_pretrained_cfg(trained.settings.model)
    sized = default is not None and default.fixed_input_size
    return f", img_size={trained.settings.image_size}" if sized else ""


def _other_first_layer(model: nn.Module) -> str:
    """What gives the first layer of a model for color the weights of other channels."""
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d))
    shape = ", ".join(map(str, layer.weight.shape))
    weight = f"torch.nn.Parameter(torch.empty({shape}))"
    return f'\nmodel.get_submodule("{name}").weight = {weight}\nmodel = model'


def _construction(trained: Trained) -> tuple[str, tuple[str, str]]:
    """The packages that the model's class needs, and its import and construction."""
    name = trained.settings.model
    if trained.facts.task.per_pixel:
        return _pixel_construction(trained)
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
            adapts = trained.settings.pretrained and channels == 3
            more = f", aux_logits=False, transform_input={adapts}"
        call = f'torchvision.models.get_model("{known}", num_classes={classes}{more})'
        if channels != 3:
            call += _other_first_layer(trained.model)
        return ", torchvision", ("import torchvision", call)
    more = _sized(trained)
    call = f'timm.create_model("{name}", num_classes={classes}, in_chans={channels}{more})'
    return ", timm", ("import timm", call)

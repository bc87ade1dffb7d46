"""Names without wrappers: compared with torch's own function, and with the wrappers of torch themselves."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel

from flambeau.recipes.checkpoints.state_dict_prefixes import add_prefix, names_like, strip_prefixes


class Inner(nn.Module):
    """Has a `sub_module`, whose name holds 'module.', and a child called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.sub_module = nn.Linear(2, 2)
        self.module = nn.BatchNorm1d(2)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,  # compiles at the first call, which there is none of
    "DataParallel of compile": lambda model: nn.DataParallel(torch.compile(model)),
    "compile of DataParallel": lambda model: torch.compile(nn.DataParallel(model)),
    "AveragedModel": AveragedModel,
    "AveragedModel of DataParallel": lambda model: AveragedModel(nn.DataParallel(model)),
    "activation checkpoints": checkpoint_wrapper,
}


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch.compile of torch 2.11 imports it
@pytest.mark.parametrize("name", WRAPS)
def test_wrappers_of_torch(name: str) -> None:
    model = Inner()
    state = WRAPS[name](model).state_dict()
    expected = model.state_dict()
    stripped = strip_prefixes(state)
    assert list(stripped) == list(expected)
    assert all(torch.equal(stripped[key], value) for key, value in expected.items())
    assert set(stripped._metadata) == set(expected._metadata)  # type: ignore[attr-defined]
    assert stripped._metadata["module"] == expected._metadata["module"]  # type: ignore[attr-defined]
    Inner().load_state_dict(stripped)
    Inner().load_state_dict(names_like(state, Inner()))
    assert "n_averaged" in state or list(names_like(stripped, WRAPS[name](Inner()))) == list(state)


def test_is_what_torch_does_for_one_prefix() -> None:
    state = nn.DataParallel(Inner()).state_dict()
    ours, theirs = strip_prefixes(state), state.copy()
    theirs._metadata = state._metadata.copy()
    consume_prefix_in_state_dict_if_present(theirs, "module.")
    assert list(ours) == list(theirs)
    assert ours._metadata == theirs._metadata  # type: ignore[attr-defined]
    assert next(iter(state)) == "module.sub_module.weight"  # the given one stays


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_wrappers_inside() -> None:
    # Regional compilation and nested wrapping, as their names come out of state_dict.
    model = nn.Sequential(torch.compile(Inner()), nn.DataParallel(Inner()))
    assert "0._orig_mod.sub_module.weight" in model.state_dict()
    plain = nn.Sequential(Inner(), Inner())
    names = list(strip_prefixes(model.state_dict()))
    assert names[0] == "0.sub_module.weight"
    assert "1.module.sub_module.weight" in names  # nobody can know; the model does
    assert list(names_like(model.state_dict(), plain)) == list(plain.state_dict())
    fsdp = {"_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.w": 1}
    assert list(strip_prefixes(fsdp)) == ["blocks.0.w"]


def test_names_that_only_look_like_prefixes() -> None:
    names = ["sub_module.weight", "module_list.0.weight", "my_orig_mod.weight", "module"]
    assert list(strip_prefixes(dict.fromkeys(names))) == names
    own = {"module.weight": 1, "head.weight": 2}  # a child called `module` beside another
    assert list(strip_prefixes(own)) == list(own)
    assert list(strip_prefixes({"module.module.w": 1})) == ["w"]
    child = nn.Module()
    child.module = nn.Linear(2, 2)
    state = nn.DataParallel(child).state_dict()
    assert list(names_like(state, child)) == ["module.weight", "module.bias"]
    assert list(strip_prefixes({})) == []


def test_unknown_names_stay_for_load_state_dict_to_say() -> None:
    state = {"module.weight": torch.ones(2, 2), "module.other": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        nn.Linear(2, 2, bias=False).load_state_dict(names_like(state, nn.Linear(2, 2, bias=False)))


def test_adding() -> None:
    model = nn.BatchNorm1d(2)
    wrapped = add_prefix(model.state_dict(), "module.")
    expected = nn.DataParallel(model).state_dict()
    assert list(wrapped) == list(expected)
    assert isinstance(wrapped, OrderedDict)
    assert strip_prefixes(wrapped).keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="ends with a dot"):
        add_prefix({}, "module")


def test_collisions_and_flat_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a\._orig_mod\.w' and 'a\.w' would both become 'a\.w'"):
        strip_prefixes({"a._orig_mod.w": 1, "a.w": 2})
    with pytest.raises(ValueError, match="flat parameter"):
        strip_prefixes({"_fsdp_wrapped_module._flat_param": 1})
    two = nn.Module()
    two.module, two.w = (
        nn.ParameterDict({"w": nn.Parameter(torch.ones(1))}),
        nn.Parameter(torch.ones(1)),
    )
    with pytest.raises(ValueError, match=r"any of \['module\.w', 'w'\]"):
        names_like({"module.module.w": 1}, two)


def test_metadata_of_a_model_that_is_one_layer_moves_with_the_prefix() -> None:
    norm = nn.BatchNorm1d(2)
    expected = nn.DataParallel(norm).state_dict()._metadata["module"]
    moved = add_prefix(norm.state_dict(), "module.")._metadata
    assert moved["module"] == expected == {"version": 2}
    assert strip_prefixes(nn.DataParallel(norm).state_dict())._metadata[""] == expected

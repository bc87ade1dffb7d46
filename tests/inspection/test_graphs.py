"""Graphs of modules and of autograd, against walks that the test makes itself."""

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flambeau.errors import InputError
from flambeau.inspection.graphs.picture import MOST_NODES, model_graphs, svg_of_graphs

SMALL: dict[str, Any] = {"vit_tiny_patch16_224": {"img_size": 64}}
SVG = "{http://www.w3.org/2000/svg}"


class Two(nn.Module):
    """Two inputs, a layer used twice, one that passes its input on, an output that is not the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.same = nn.Embedding(9, 4), nn.Identity()
        self.left, self.right, self.shared = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        x = self.same(self.embed(ids) * mask[..., None])
        y = self.shared(self.left(x)) + self.shared(self.right(x))
        return {"logits": y.mean(1), "count": mask.sum(1)}


INPUT = (torch.zeros(5, 7, dtype=torch.int64),), {"mask": torch.ones(5, 7)}


def walk(outputs: list[Tensor]) -> tuple[set[Any], set[tuple[Any, Any]]]:
    """Nodes and edges of autograd's graph."""
    todo, nodes, edges = [one.grad_fn for one in outputs if one.grad_fn], set(), set()
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            sources = [source for source, _ in node.next_functions if source is not None]
            edges |= {(source, node) for source in sources}
            todo += sources
    return nodes, edges


def test_modules_and_the_data_between_them() -> None:
    graph = model_graphs(Two(), *INPUT).modules
    names = [
        (node.role, node.name + (f" {node.call}" if node.call > 1 else "")) for node in graph.nodes
    ]
    assert sorted(names) == [
        ("input", "ids"), ("input", "mask"),
        ("module", "embed"), ("module", "left"), ("module", "right"), ("module", "same"),
        ("module", "shared"), ("module", "shared 2"),
        ("operation", "add"), ("operation", "mean"), ("operation", "mul"), ("operation", "sum"),
        ("operation", "unsqueeze"),
        ("output", "['count']"), ("output", "['logits']"),
    ]  # fmt: skip
    edges = {(names[a][1], names[b][1]) for a, b in graph.edges}
    assert edges == {
        ("ids", "embed"), ("embed", "mul"), ("mask", "unsqueeze"), ("unsqueeze", "mul"), ("mul", "same"),
        ("same", "left"), ("same", "right"), ("left", "shared"), ("right", "shared 2"), ("shared", "add"),
        ("shared 2", "add"), ("add", "mean"), ("mean", "['logits']"), ("mask", "sum"), ("sum", "['count']"),
    }  # fmt: skip
    (left,) = (node for node in graph.nodes if node.name == "left")
    assert (left.kind, left.output, left.parameters) == ("Linear", ((5, 7, 4),), 20)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "densenet121"])
def test_every_module_that_is_called_is_there(name: str) -> None:
    called: list[str] = []
    model = timm.create_model(name, **SMALL.get(name, {})).train()
    for full, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *_, full=full: called.append(full))
    image = torch.ones(2, 3, 64, 64)
    output = model(image)
    seen = list(called)
    graphs = model_graphs(model, (image,), depth=99)
    assert [n.name for n in graphs.modules.nodes if n.role == "module"] == seen
    nodes, edges = walk([output])
    graph = model_graphs(model, (image,)).autograd
    assert sum(node.nodes for node in graph.nodes) == len(nodes)
    if graph.depth is None:
        assert len(graph.edges) == len(edges)
        leaves = {node.name for node in graph.nodes if node.leaf}
        assert leaves == {full for full, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mobilenetv3_small_100"])
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_kept_bytes_are_those_that_autograd_packs(name: str, depth: int | None) -> None:
    model = timm.create_model(name, **SMALL.get(name, {})).train()
    image = torch.ones(2, 3, 64, 64)
    own = (*model.parameters(), *model.buffers(), image)
    known = {t.untyped_storage()._cdata for t in own}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(image)
    size = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in known)
    assert model_graphs(model, (image,), depth=depth).kept_bytes == size > 0


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Sequential(nn.Linear(4, 64), nn.Sigmoid(), nn.Linear(64, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.again, x * 2, use_reentrant=False)
        assert isinstance(y, Tensor)
        return self.head(y)


def test_what_is_computed_again_is_not_kept() -> None:
    graphs = model_graphs(Checkpointed(), (torch.empty(3, 4),))
    (sigmoid,) = (node for node in graphs.autograd.nodes if node.name == "SigmoidBackward0")
    assert [saved.of for saved in sigmoid.saved] == ["computed again in the backward pass"]
    assert graphs.kept_bytes == 2 * (3 * 4 * 4)  # what the segment takes, and what the head takes
    svg_of_graphs(graphs)


def test_saved_tensors_say_what_they_are() -> None:
    graphs = model_graphs(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.empty(2, 4),))
    nodes = {node.name: node for node in graphs.autograd.nodes}
    (weight,) = (s for s in nodes["AddmmBackward0"].saved if s.name == "mat1")
    assert (weight.of, weight.size_bytes, weight.shape) == ("input input", 0, (2, 4))
    (result,) = nodes["ReluBackward0"].saved
    assert (result.size_bytes, result.of, result.dtype) == (2 * 3 * 4, "", "float32")
    assert nodes["0.bias"].leaf and nodes["0.bias"].shape == (3,)
    assert nodes["ReluBackward0"].module == "1"


class Doubled(torch.autograd.Function):
    """A function of one's own, which keeps its input or its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep_output: bool) -> Tensor:
        y = 2 * x
        ctx.save_for_backward(y if keep_output else x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (_kept,) = ctx.saved_tensors
        return 2 * grads[0], None


class Own(nn.Module):
    def __init__(self, *, keep_output: bool) -> None:
        super().__init__()
        self.linear, self.keep_output = nn.Linear(4, 4), keep_output

    def forward(self, x: Tensor) -> Tensor:
        y = Doubled.apply(self.linear(x), self.keep_output)  # type: ignore[no-untyped-call]
        y[:, :2] += 1  # in place, through a view
        return y.relu_()


def test_functions_of_ones_own_and_changes_in_place() -> None:
    graphs = model_graphs(Own(keep_output=False), (torch.empty(3, 4),))
    assert any(node.name == "DoubledBackward" for node in graphs.autograd.nodes)
    names = [node.name for node in graphs.modules.nodes]
    edges = {(names[a], names[b]) for a, b in graphs.modules.edges}
    assert ("linear", "mul") in edges
    assert ("relu_", "output" if "output" in names else "") in edges
    # What relu_ takes has gone through the addition in the view.
    reached, todo = set(), ["linear"]
    while todo:
        reached.add(todo[-1])
        last = todo.pop()
        todo += [b for a, b in edges if a == last and b not in reached]
    assert {"add_", "relu_"} <= reached


def test_what_makes_a_backward_pass_fail_is_said() -> None:
    model = Own(keep_output=True)
    graphs = model_graphs(model, (torch.empty(3, 4),))
    (note,) = graphs.notes
    assert note.endswith("what DoubledBackward in the model keeps is changed in place")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(3, 4)).sum().backward()


def test_a_picture_is_text_that_any_parser_reads() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<a&b>\x00\x1b", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            (module,) = self.children()
            return module(x)

    text = svg_of_graphs(model_graphs(Odd(), (torch.empty(2, 4),)))
    root = ElementTree.fromstring(text)
    assert root.find(f"{SVG}title").text == "Odd: modules and autograd graph"  # type: ignore[union-attr]
    assert "<a&b>" in "".join(root.itertext())
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        "svg", "title", "desc", "defs", "marker", "path", "rect", "g", "text",
    }  # fmt: skip
    assert "href" not in text and "url(#arrow)" in text


def test_boxes_do_not_touch_and_lines_go_down() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50")
        graphs = model_graphs(model, (torch.empty(1, 3, 64, 64),))
    root = ElementTree.fromstring(svg_of_graphs(graphs))
    boxes = [
        tuple(float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
        for rect in root.iterfind(f"{SVG}g/{SVG}rect")
    ]
    assert len(boxes) == len(graphs.modules.nodes) + len(graphs.autograd.nodes)
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in boxes)
    for number, (x, y, w, h) in enumerate(boxes):
        for to_x, to_y, to_w, to_h in boxes[:number]:
            apart = x + w < to_x or to_x + to_w < x or y + h < to_y or to_y + to_h < y
            assert apart, (boxes[number], (to_x, to_y))


def test_too_many_nodes_are_put_together() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(MOST_NODES + 1)))
    with torch.device("meta"):
        image = torch.empty(1, 1)
    graphs = model_graphs(model, (image,), depth=2)
    assert graphs.modules.depth == graphs.autograd.depth == 0
    assert "modules: drawn to depth 0, as depth 2 has more than 1,500 nodes" in graphs.notes
    assert len(graphs.modules.nodes) == 3
    assert sum(node.leaves for node in graphs.autograd.nodes) == 2 * (MOST_NODES + 1)
    ElementTree.fromstring(svg_of_graphs(graphs))


def test_without_a_depth_it_is_as_deep_as_is_readable() -> None:
    """Rather many nodes than the model as one box."""
    many = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(800)))
    graphs = model_graphs(many, (torch.empty(1, 1, device="meta"),))
    assert (graphs.modules.depth, graphs.autograd.depth) == (1, 1)
    some = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(100)))
    graphs = model_graphs(some, (torch.empty(1, 1, device="meta"),))
    assert (graphs.modules.depth, graphs.autograd.depth) == (2, 2)
    few = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    graphs = model_graphs(few, (torch.empty(1, 1, device="meta"),))
    assert (graphs.modules.depth, graphs.autograd.depth) == (2, None)


def test_what_cannot_be_trained_on_one_example_is_followed_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graphs = model_graphs(model, (torch.empty(1, 4),))
    assert not graphs.training
    assert graphs.notes == ("in evaluation mode: in training mode the model refuses this input",)
    assert model.training


def test_values_that_are_read_and_weights_that_are_frozen() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum().item() < 1e9 else x

    graphs = model_graphs(Reads(), (torch.empty(2, 4, device="meta"),))
    assert graphs.notes[0].startswith("the model reads values of its tensors")
    assert graphs.autograd.nodes == () and graphs.kept_bytes == 0
    ElementTree.fromstring(svg_of_graphs(graphs))


def test_a_wrong_input_is_named() -> None:
    with pytest.raises(
        InputError, match=r"Linear does not take \(float32 \(2, 5\)\): RuntimeError"
    ):
        model_graphs(nn.Linear(4, 4), (torch.empty(2, 5),))
    with pytest.raises(InputError, match=r"Linear does not take \(\): TypeError"):
        model_graphs(nn.Linear(4, 4))

"""What the names of a program stand for: imports, aliases, star imports, attributes of self, reassignments.

A name is resolved only if all that is ever assigned to it in its scope gives the same answer.
"""

import ast
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import cached_property, wraps
from typing import Any, Callable, Optional, TypeVar, Union, cast

from flambeau_lint.source import Source

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Loop = (ast.For, ast.While, ast.AsyncFor)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = frozenset((ast.Module, ast.Lambda, ast.ClassDef, *Function, *_COMPREHENSIONS))
# What an older or newer library raises: a name or an argument that it does not have.
_CAUGHT = {
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
    "Exception",
    "BaseException",
    "",
}
_OF_IMPORT = {"ImportError", "ModuleNotFoundError"}
# How programs call it: hasattr(torch, ..), version.parse(..), _TORCH_GREATER_EQUAL_2_4, HAS_AMP, TORCH_2,
# TORCH_MAJOR, "x" in dir(torch).
_TESTS = re.compile(
    r"version|hasattr|find_spec|has_|compat|greater|less_|torch_?\d|_\d+_\d+|_(ge|gt|le|lt)_"
    r"|major|minor|\bdir\("
)

ROOTS = ("torch", "timm", "apex", "lightning", "tensorflow", "mxnet")
"""A file without one of these words has nothing to be found in."""

_MODULES = {
    "torch",
    "torchvision",
    "torchaudio",
    "torchtext",
    "timm",
    "apex",
    "functorch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "tensorflow",
    "mxnet",
    "numpy",
    "os",
}

_SKIP = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
_FIELDS: dict[type, tuple[str, ...]] = {}


def _fields(cls: type) -> tuple[str, ...]:
    """The fields of a class of nodes that can hold nodes."""
    plain = {"ctx", "id", "attr", "lineno", "n", "s", "kind", "type_comment", "level", "op", "ops"}
    if issubclass(cls, (*_SKIP, ast.Constant)):
        return ()
    return tuple(name for name in cls._fields if name not in plain)  # type: ignore[attr-defined]


Place = tuple[str, Optional[ast.AST]]
"""What all uses of a variable share: its name and the scope that binds it; of `self.x` '.x' and the class."""
Question = TypeVar("Question", bound=Callable[..., Any])


def once(question: Question) -> Question:
    """A function of a program and of some words that is called once for the same ones.

    For what many nodes ask alike: answered anew for each of them, a file of many lines takes minutes.
    """

    @wraps(question)
    def answer(program: "Program", *words: Hashable) -> Any:
        key = (question, words)
        if key not in program.answers:
            program.answers[key] = question(program, *words)
        return program.answers[key]

    return cast(Question, answer)


class Program:
    """A tree with its names."""

    def __init__(self, source: Source, tree: ast.Module, star: Optional[set[str]] = None) -> None:
        self.source = source
        self.tree = tree
        self._star = star or set()
        self.loads: dict[str, list[ast.Name]] = {}
        self.calls: list[ast.Call] = []
        self.attributes: dict[str, list[ast.Attribute]] = {}
        self.strings: list[ast.Constant] = []
        self.classes: list[ast.ClassDef] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self._stores: dict[str, list[ast.AST]] = {}
        self._globals: dict[str, list[ast.AST]] = {}
        self._star_modules: list[str] = []
        self._tables: dict[str, dict[ast.AST, list[ast.AST]]] = {}
        self._dotted: dict[ast.AST, str] = {}
        self._meanings: dict[Place, str] = {}
        self.answers: dict[Hashable, Any] = {}
        self._attribute_stores: dict[str, list[ast.Attribute]] = {}
        self._only_stores: dict[tuple[ast.ClassDef, str], Optional[ast.AST]] = {}
        self.imports: list[Union[ast.Import, ast.ImportFrom]] = []
        self._walk()

    # ------------------------------------------------------------ the walk

    def _walk(self) -> None:
        """Once over all nodes; each kind in a list of its own."""
        fields = _FIELDS
        parents = self.parents
        loads = self.loads
        stores = self._stores
        attributes = self.attributes
        todo: list[ast.AST] = [self.tree]
        pop = todo.pop
        append = todo.append
        while todo:
            node = pop()
            cls = node.__class__
            if cls is ast.Name:
                table = loads if node.ctx.__class__ is ast.Load else stores  # type: ignore[attr-defined]
                table.setdefault(node.id, []).append(node)  # type: ignore[attr-defined,arg-type]
                continue
            if cls is ast.Constant:
                if node.value.__class__ is str:  # type: ignore[attr-defined]
                    self.strings.append(node)  # type: ignore[arg-type]
                continue
            if cls is ast.Attribute:
                attributes.setdefault(node.attr, []).append(node)  # type: ignore[attr-defined,arg-type]
                if node.ctx.__class__ is not ast.Load:  # type: ignore[attr-defined]
                    self._attribute_stores.setdefault(node.attr, []).append(node)  # type: ignore[attr-defined,arg-type]
                child = node.value  # type: ignore[attr-defined]
                parents[child] = node
                append(child)
                continue
            if cls is ast.Call:
                self.calls.append(node)  # type: ignore[arg-type]
            names = fields.get(cls)
            if names is None:
                names = fields[cls] = _fields(cls)
            for name in names:
                child = getattr(node, name)
                if child.__class__ is list:
                    for item in child:
                        if isinstance(item, ast.AST):
                            parents[item] = node
                            append(item)
                elif isinstance(child, ast.AST):
                    parents[child] = node
                    append(child)
            keep = _KEEP.get(cls)
            if keep is not None:
                keep(self, node)
        for lists in (loads, attributes):
            for nodes in lists.values():
                nodes.reverse()

    def _keep_import(self, node: ast.AST) -> None:
        assert isinstance(node, (ast.Import, ast.ImportFrom))
        self.imports.append(node)
        for alias in node.names:
            if alias.name == "*":
                self._star_modules.append(getattr(node, "module", "") or ".")
                continue
            name = alias.asname or alias.name.partition(".")[0]
            self._stores.setdefault(name, []).append(alias)

    def _keep_named(self, node: ast.AST) -> None:
        name = getattr(node, "name", None)
        if name:
            self._stores.setdefault(name, []).append(node)
        if isinstance(node, ast.ClassDef):
            self.classes.append(node)

    def _keep_argument(self, node: ast.AST) -> None:
        self._stores.setdefault(node.arg, []).append(node)  # type: ignore[attr-defined]

    def _keep_rest(self, node: ast.AST) -> None:
        name = getattr(node, "rest", None)
        if name:
            self._stores.setdefault(name, []).append(node)

    def _keep_globals(self, node: ast.AST) -> None:
        for name in node.names:  # type: ignore[attr-defined]
            self._globals.setdefault(name, []).append(node)

    @once
    def says(self, text: bytes) -> bool:
        """Whether a text stands anywhere in the file."""
        return text in self.source.data

    # ------------------------------------------------------------ scopes

    def parents_of(self, node: ast.AST) -> Iterator[ast.AST]:
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)

    def scope_of(self, node: ast.AST) -> ast.AST:
        """The function, class, comprehension or module in which a node is evaluated."""
        parents = self.parents
        child = node
        parent = parents.get(node)
        while parent is not None:
            if parent.__class__ in _SCOPES:  # the classes themselves: this is called for each name
                if isinstance(parent, ast.Lambda):
                    is_inside = not isinstance(child, ast.arguments)
                else:
                    is_inside = isinstance(child, ast.stmt) or isinstance(parent, _COMPREHENSIONS)
                if is_inside:
                    return parent
            child = parent
            parent = parents.get(parent)
        return self.tree

    def _scope_of_binding(self, name: str, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.arg):
            return next(p for p in self.parents_of(node) if isinstance(p, (ast.Lambda, *Function)))
        scope = self.scope_of(node)
        if isinstance(self.parents.get(node), ast.NamedExpr):
            while isinstance(scope, _COMPREHENSIONS):
                scope = self.scope_of(scope)
        is_global = name in self._globals and scope in self._scopes_of_global(name)
        return self.tree if is_global else scope

    @once
    def _scopes_of_global(self, name: str) -> set[ast.AST]:
        """Those in which `global` or `nonlocal` says a name."""
        return {self.scope_of(one) for one in self._globals[name]}

    def bindings(self, name: str, node: ast.AST) -> list[ast.AST]:
        """All that binds a name in the innermost scope, seen from a node, that binds it."""
        return self._find(name, node)[1]

    def _find(self, name: str, node: ast.AST) -> tuple[ast.AST, list[ast.AST]]:
        if name not in self._stores:
            return self.tree, []
        table = self._tables.get(name) or self._by_scope(name)
        if len(table) == 1 and self.tree in table:  # most imports: no scope has to be looked for
            return self.tree, table[self.tree]
        scope = self.scope_of(node)
        is_first = True
        while True:
            if scope in table and (is_first or not isinstance(scope, ast.ClassDef)):
                return scope, table[scope]
            if scope is self.tree:
                return scope, []
            scope = self.scope_of(scope)
            is_first = False

    def _by_scope(self, name: str) -> dict[ast.AST, list[ast.AST]]:
        """All that binds a name, by the scope that it is bound in."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = {}
            for store in self._stores.get(name, ()):
                table.setdefault(self._scope_of_binding(name, store), []).append(store)
            for found in table.values():
                found.sort(
                    key=lambda one: (getattr(one, "lineno", 0), getattr(one, "col_offset", 0))
                )
        return table

    def is_bound(self, name: str) -> bool:
        """Whether anything in the file binds the name."""
        return name in self._stores

    @cached_property
    def module_imports(self) -> dict[str, str]:
        """What each name stands for that imports alone bind, all to the same, at the top."""
        found = {}
        for name in self._stores:
            meanings = {
                self._of_alias(one) if isinstance(one, ast.alias) else ""
                for one in self._find(name, self.tree)[1]
            }
            if len(meanings) == 1 and "" not in meanings:
                found[name] = meanings.pop()
        return found

    # ------------------------------------------------------------ what an expression is

    def dotted(self, node: ast.AST) -> str:
        """'torch.nn.functional.relu' for what an expression stands for; empty if that is not known."""
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            if owner:
                return f"{owner}.{node.attr}"
            return self._of_self(node) if node.attr in self._holders else ""
        if not isinstance(node, ast.Name):
            return ""
        found = self._dotted.get(node)
        if found is None:
            found = self._dotted[node] = self._resolve(node)
        return found

    def _resolve(self, node: ast.Name) -> str:
        scope, found = self._find(node.id, node)
        if not found:
            return self._from_star(node.id)
        place = (node.id, scope)
        if place not in self._meanings:
            self._meanings[place] = ""  # a name that is made of itself
            answers = {self._of_binding(one) for one in found}
            self._meanings[place] = answers.pop() if len(answers) == 1 else ""
        return self._meanings[place]

    def _from_star(self, name: str) -> str:
        if self.is_bound(name) or not self._star_modules:
            return ""
        if any(module.partition(".")[0] not in _MODULES for module in self._star_modules):
            return ""  # another module may have such a name
        known = [
            f"{module}.{name}" for module in self._star_modules if f"{module}.{name}" in self._star
        ]
        return known[0] if len(known) == 1 else ""

    def _of_binding(self, node: ast.AST) -> str:
        if isinstance(node, ast.alias):
            return self._of_alias(node)
        value = self._assigned(node)
        return self.dotted(value) if isinstance(value, (ast.Name, ast.Attribute)) else ""

    def _of_alias(self, node: ast.alias) -> str:
        parent = self.parents[node]
        if isinstance(parent, ast.ImportFrom):
            is_here = parent.level or not parent.module
            return "" if is_here else f"{parent.module}.{node.name}"
        return node.name if node.asname else node.name.partition(".")[0]

    def _assigned(self, node: ast.AST) -> Optional[ast.expr]:
        """The value of `name = value`, or of `with value as name`."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.Assign) and node in parent.targets:
            return parent.value
        if isinstance(parent, (ast.AnnAssign, ast.NamedExpr)) and parent.target is node:
            return parent.value
        if isinstance(parent, ast.withitem) and parent.optional_vars is node:
            return parent.context_expr
        return None

    # ------------------------------------------------------------ attributes of self

    def _of_self(self, node: ast.Attribute) -> str:
        """What an attribute of self stands for: `self.lib` where the class says `self.lib = torch` once."""
        if not isinstance(node.value, ast.Name):
            return ""
        found = self._dotted.get(node)
        if found is None:
            self._dotted[node] = ""  # an attribute that is made of itself
            owner = self._class_of_self(node.value)
            store = self._only_store(owner, node.attr) if owner else None
            # A function that a class holds is a method, whose first argument is self.
            is_method = not isinstance(store, ast.Attribute) and not isinstance(
                self.parents.get(node), ast.Attribute
            )
            found = "" if store is None or is_method else self._of_binding(store)
            self._dotted[node] = found
        return found

    @cached_property
    def _holders(self) -> set[str]:
        """Attributes to which some class gives a library or something of one, by the words of the source."""
        found = set()
        libraries = set()
        for statement in self.imports:
            for alias in statement.names:
                name = alias.asname or alias.name.partition(".")[0]
                if self._of_alias(alias).partition(".")[0] in _MODULES:
                    libraries.add(name)
                    if isinstance(self.parents[statement], ast.ClassDef):
                        found.add(name)
        stores: list[tuple[str, ast.AST]] = []
        for name, assigned in self._attribute_stores.items():
            stores += [(name, one) for one in assigned]
        for owner in self.classes:
            for assign in owner.body:
                if isinstance(assign, ast.Assign):
                    stores += [(one.id, one) for one in assign.targets if isinstance(one, ast.Name)]
        values = [(name, self._assigned(one)) for name, one in stores]
        given = [one for one in values if one[1].__class__ in (ast.Name, ast.Attribute)]
        size = -1
        while len(found) != size:  # self.nn = self.lib.nn
            size = len(found)
            found.update(name for name, value in given if _begins_with(value, libraries, found))
        return found

    def _class_of_self(self, node: ast.Name) -> Optional[ast.ClassDef]:
        """The class in whose method a name is `self` or `cls`: the first argument, and nothing else."""
        found = self.bindings(node.id, node)
        arguments = self.parents.get(found[0]) if len(found) == 1 else None
        method = self.parents.get(arguments) if isinstance(arguments, ast.arguments) else None
        if not isinstance(method, Function):
            return None
        owner = self.scope_of(method)
        first = [*method.args.posonlyargs, *method.args.args][:1]
        is_static = any(getattr(one, "id", "") == "staticmethod" for one in method.decorator_list)
        is_self = found == first and not is_static
        return owner if is_self and isinstance(owner, ast.ClassDef) else None

    @cached_property
    def _lineages(self) -> dict[ast.ClassDef, set[ast.ClassDef]]:
        """Each class with those of the file that it derives from."""
        by_name: dict[str, list[ast.ClassDef]] = {}
        for owner in self.classes:
            by_name.setdefault(owner.name, []).append(owner)
        lines: dict[ast.ClassDef, set[ast.ClassDef]] = {}
        for owner in self.classes:
            line = lines[owner] = {owner}
            todo = [owner]
            while todo:
                names = _words_of(todo.pop().bases) & by_name.keys()
                more = [one for name in names for one in by_name[name] if one not in line]
                line.update(more)
                todo.extend(more)
        return lines

    @cached_property
    def _families(self) -> dict[ast.ClassDef, set[ast.ClassDef]]:
        """Each class with those that derive from it, and all that these derive from."""
        families: dict[ast.ClassDef, set[ast.ClassDef]] = {}
        for line in self._lineages.values():
            for owner in line:
                families.setdefault(owner, set()).update(line)
        return families

    def _only_store(self, owner: ast.ClassDef, name: str) -> Optional[ast.AST]:
        """What alone binds an attribute in a class and in all related to it; None if that is not sure."""
        key = (owner, name)
        if key not in self._only_stores:
            family = self._families[owner]
            stores = self._stores_of(name, family)
            is_given = len(stores) == 1 and stores[0][0] in self._lineages[owner]
            store = stores[0][1] if is_given else None
            # `lib: type = torch` in a class may be the default of a data class.
            is_field = isinstance(store, ast.Name) and isinstance(
                self.parents[store], ast.AnnAssign
            )
            is_open = store is None or is_field or self.is_guarded(store)
            self._only_stores[key] = (
                None if is_open or self._is_set_by_name(name, family) else store
            )
        return self._only_stores[key]

    def _stores_of(
        self, name: str, family: Collection[ast.ClassDef]
    ) -> list[tuple[ast.ClassDef, ast.AST]]:
        """What gives an attribute to some classes or their objects; nothing if some object may be any."""
        given = self._given_to_objects(name)
        if None in given:
            return []
        scopes = self._by_scope(name)
        return [
            (owner, store)
            for owner in family
            for store in (*given.get(owner, ()), *scopes.get(owner, ()))
            if not self._is_declared(store)
        ]

    @once
    def _given_to_objects(self, name: str) -> dict[Optional[ast.ClassDef], list[ast.AST]]:
        """What gives an attribute to objects, by their class; None is the class of those that may be any."""
        found: dict[Optional[ast.ClassDef], list[ast.AST]] = {}
        for store in self._attribute_stores.get(name, ()):
            is_name = isinstance(store.value, ast.Name)
            owner = self._class_of_self(store.value) if is_name else None  # type: ignore[arg-type]
            found.setdefault(owner, []).append(store)
        return found

    def _is_declared(self, node: ast.AST) -> bool:
        """Whether `name: type` says no more than that."""
        parent = self.parents.get(node)
        return isinstance(parent, ast.AnnAssign) and parent.value is None

    def _is_set_by_name(self, name: str, family: Collection[ast.ClassDef]) -> bool:
        """Whether a string may say the attribute's name: setattr(self, key, value)."""
        return name in self.texts or not self._set_by_name.isdisjoint(family)

    @cached_property
    def texts(self) -> set[object]:
        """All strings of the file."""
        return {one.value for one in self.strings}

    @cached_property
    def _set_by_name(self) -> set[Optional[ast.ClassDef]]:
        """The classes in which a string may say the name of any attribute."""
        ways: list[ast.AST] = [*self.loads.get("setattr", ()), *self.loads.get("vars", ())]
        ways += [*self.attributes.get("__dict__", ()), *self.attributes.get("__setattr__", ())]
        return {self.class_of(one) for one in ways}

    # ------------------------------------------------------------ values

    def values_of(self, node: ast.AST) -> list[ast.expr]:
        """All that is ever assigned to a name or to an attribute of self; empty if something is unknown."""
        place = self.place_of(node)
        return self.values_at(place) if place else []

    def place_of(self, node: ast.AST) -> Optional[Place]:
        """The key of a name or of an attribute of self, by which `once` answers the same to all its uses."""
        if isinstance(node, ast.Name):
            return node.id, self._find(node.id, node)[0]
        if _is_of_self(node):
            return f".{node.attr}", self.class_of(node)  # type: ignore[attr-defined]
        return None

    @once
    def values_at(self, place: Place) -> list[ast.expr]:
        """What values_of gives for each use of a variable."""
        values = [self._assigned(store) for store in self.stores_at(place)]
        return [] if None in values else values  # type: ignore[return-value]

    def stores_at(self, place: Place) -> Sequence[ast.AST]:
        """All that binds a variable."""
        name, scope = place
        if not name.startswith("."):
            return self._by_scope(name).get(scope, ())  # type: ignore[arg-type]
        same = self.attributes_by_class(name[1:]).get(scope, ())  # type: ignore[arg-type]
        return [one for one in same if isinstance(one.ctx, ast.Store) and _is_of_self(one)]

    @once
    def of_all(
        self, question: Callable[..., bool], place: Optional[Place], *words: Hashable
    ) -> bool:
        """Whether something is assigned to a variable, and a function says yes to all that ever is."""
        values = self.values_at(place) if place else []
        return bool(values) and all(question(self, value, *words) for value in values)

    @once
    def attributes_by_class(self, name: str) -> dict[Optional[ast.ClassDef], list[ast.Attribute]]:
        """All attributes of a name, by the class that they stand in."""
        found: dict[Optional[ast.ClassDef], list[ast.Attribute]] = {}
        for one in self.attributes.get(name, ()):
            found.setdefault(self.class_of(one), []).append(one)
        return found

    def class_of(self, node: ast.AST) -> Optional[ast.ClassDef]:
        return next((p for p in self.parents_of(node) if isinstance(p, ast.ClassDef)), None)

    def function_of(self, node: ast.AST) -> Optional[ast.AST]:
        return next((p for p in self.parents_of(node) if isinstance(p, Function)), None)

    def loop_of(self, node: ast.AST) -> Optional[ast.AST]:
        return next((p for p in self.parents_of(node) if isinstance(p, Loop)), None)

    def made_by(self, node: ast.AST) -> frozenset[str]:
        """The functions whose call gave an object, one of them; empty if that is not known."""
        if isinstance(node, ast.Call):
            name = self.dotted(node.func)
            return frozenset({name} if name else ())
        place = self.place_of(node)
        return self.made_at(place) if place else frozenset()

    @once
    def made_at(self, place: Place) -> frozenset[str]:
        """What made_by gives for each use of a variable."""
        found: set[str] = set()
        for value in self.values_at(place):
            if isinstance(value, ast.Constant) and value.value is None:
                continue
            names = self.made_by(value) if isinstance(value, ast.Call) else frozenset()
            if not names:
                return frozenset()
            found |= names
        return frozenset(found)

    def is_module(self, node: ast.ClassDef) -> bool:
        """Whether a class directly derives from torch.nn.Module."""
        return any(
            self.dotted(base) in ("torch.nn.Module", "torch.nn.modules.Module")
            for base in node.bases
        )

    def are_alternatives(self, node: ast.AST, other: ast.AST) -> bool:
        """Whether one stands in the body of an `if`, and the other in its `else`."""
        below = dict(zip(self.parents_of(other), [other, *self.parents_of(other)]))
        child = node
        for parent in self.parents_of(node):
            if parent in below:
                beside = below[parent]
                is_if = isinstance(parent, ast.If)
                return is_if and (child in parent.body) != (beside in parent.body)  # type: ignore[attr-defined]
            child = parent
        return False

    # ------------------------------------------------------------ statements

    def index_of(self, statement: ast.AST) -> tuple[Sequence[ast.stmt], int]:
        """The list of statements that one stands in, and its place there; (), 0 if it stands in none."""
        return self._indexes(self.parents.get(statement)).get(statement, ((), 0))

    @once
    def _indexes(self, parent: Optional[ast.AST]) -> dict[ast.AST, tuple[Sequence[ast.stmt], int]]:
        bodies = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        lists = [body for body in bodies if isinstance(body, list)]
        return {one: (body, index) for body in lists for index, one in enumerate(body)}

    @once
    def methods_in(self, statement: ast.AST) -> dict[str, ast.Attribute]:
        """The methods that a statement calls, in whatever objects: of each name the outermost one."""
        found: dict[str, ast.Attribute] = {}
        for node in ast.walk(statement):
            method = node.func if isinstance(node, ast.Call) else None
            if isinstance(method, ast.Attribute):
                found.setdefault(method.attr, method)
        return found

    # ------------------------------------------------------------ what is not to be reported

    def is_guarded(self, node: ast.AST) -> bool:
        """Whether the program decides between old and new: by a version, hasattr, or a caught error."""
        is_import = isinstance(node, (ast.alias, ast.ImportFrom))
        child = node
        for parent in self.parents_of(node):
            if self._guards(parent, child) or (is_import and self._is_of_import(parent)):
                return True
            child = parent
        return False

    def _guards(self, parent: ast.AST, child: ast.AST) -> bool:
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            return _TESTS.search(self.source.text_of(parent.test).lower()) is not None
        if isinstance(parent, ast.ExceptHandler):
            return bool(_caught_by(parent) & _CAUGHT)
        is_tried = isinstance(parent, ast.Try) and child in parent.body
        return is_tried and any(_caught_by(one) & _CAUGHT for one in parent.handlers)  # type: ignore[attr-defined]

    def _is_of_import(self, parent: ast.AST) -> bool:
        """Whether it is an `if` that asks for a name which `except ImportError` has set."""
        return isinstance(parent, ast.If) and self._asks_for_import(parent)

    @once
    def _asks_for_import(self, parent: ast.If) -> bool:
        test = parent.test
        names = [one for one in ast.walk(test) if isinstance(one, ast.Name)]
        around = (
            parent
            for name in names
            for store in self.bindings(name.id, name)
            for parent in self.parents_of(store)
        )
        return any(
            isinstance(one, ast.ExceptHandler) and bool(_caught_by(one) & _OF_IMPORT)
            for one in around
        )

    def is_called(self, node: ast.AST) -> Optional[ast.Call]:
        """The call whose function a node is."""
        parent = self.parents.get(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    def uses(self) -> Iterator[tuple[str, ast.AST]]:
        """(dotted name, node) of each use of what is imported: a chain, and those that it begins with."""
        holders = self._holders
        for name, nodes in self.loads.items():
            if name not in self._stores and not self._star_modules:
                continue
            for node in nodes:
                dotted = self.dotted(node)
                chain: ast.AST = node
                if dotted.partition(".")[0] in _MODULES:
                    yield dotted, node
                else:
                    chain = self.parents[node]
                    if not isinstance(chain, ast.Attribute) or chain.attr not in holders:
                        continue
                    dotted = self.dotted(chain)  # not yielded: it is reported where self gets it
                    if dotted.partition(".")[0] not in _MODULES:
                        continue
                parent = self.parents.get(chain)
                while isinstance(parent, ast.Attribute):
                    dotted = f"{dotted}.{parent.attr}"
                    yield dotted, parent
                    chain = parent
                    parent = self.parents.get(chain)


def _is_of_self(node: ast.AST) -> bool:
    is_of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_of_name and node.value.id == "self"  # type: ignore[attr-defined]


def _begins_with(
    value: Optional[ast.expr], names: Collection[str], attributes: Collection[str]
) -> bool:
    """Whether a chain begins with one of some names, or with one of some attributes of another name."""
    attribute = ""
    while isinstance(value, ast.Attribute):
        attribute = value.attr
        value = value.value
    return isinstance(value, ast.Name) and (value.id in names or attribute in attributes)


def _words_of(bases: Sequence[ast.expr]) -> set[str]:
    """Of what a class may derive: `Base` of `module.Base[int]`, and of `with_meta(Meta, Base)`."""
    parts = [part for base in bases for part in ast.walk(base)]
    return {getattr(part, "attr", getattr(part, "id", "")) for part in parts}


def _caught_by(handler: ast.ExceptHandler) -> set[str]:
    """The last words of what a handler catches; an empty one catches all."""
    if handler.type is None:
        return {""}
    parts = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {getattr(part, "attr", getattr(part, "id", "?")) for part in parts}


_KEEP = {
    ast.Import: Program._keep_import,
    ast.ImportFrom: Program._keep_import,
    ast.FunctionDef: Program._keep_named,
    ast.AsyncFunctionDef: Program._keep_named,
    ast.ClassDef: Program._keep_named,
    ast.ExceptHandler: Program._keep_named,
    ast.arg: Program._keep_argument,
    ast.Global: Program._keep_globals,
    ast.Nonlocal: Program._keep_globals,
    **{
        getattr(ast, name): keep
        for name, keep in (
            ("MatchAs", Program._keep_named),
            ("MatchStar", Program._keep_named),
            ("MatchMapping", Program._keep_rest),
        )
        if hasattr(ast, name)  # Python 3.10
    },
}

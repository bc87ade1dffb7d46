"""Tables hold text and nothing else, and say what a screen reader needs."""

from html.parser import HTMLParser

from flambeau.report.markup import escaped, frame, heading, row, table

ODD = '<b onclick="x">\'&'


class Reader(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.texts = list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_text_is_text_wherever_it_stands() -> None:
    found = Reader(table([ODD, "n"], [[ODD, ODD]], numbers=1, caption=ODD))
    assert "".join(found.texts).strip() == ODD + ODD + "n" + ODD + ODD
    assert {tag for tag, _ in found.tags} == {
        "div", "table", "caption", "thead", "tbody", "tr", "th", "td",
    }  # fmt: skip
    assert found.tags[0] == (
        "div", {"class": "scroll", "tabindex": "0", "role": "group", "aria-label": ODD},
    )  # fmt: skip
    assert Reader(f'<p title="{escaped(ODD)}">').tags == [("p", {"title": ODD})]


def test_numbers_are_marked_and_rows_have_names() -> None:
    found = Reader(table(["a", "b", "c"], [["x", 1, 2], ["y", 3, 4]], numbers=1))
    cells = [(tag, given.get("scope"), given.get("class")) for tag, given in found.tags[4:]]
    of_row = [("tr", None, None), ("th", "row", None), ("td", None, None), ("td", None, "number")]
    assert cells[:2] == [("th", "col", None)] * 2
    assert cells[2] == ("th", "col", "number")
    assert cells[4:] == of_row * 2


def test_a_frame_with_a_name_and_a_row_that_differs() -> None:
    page = frame(
        [heading(ODD, sorts=True)], [row("a", [7], differs=True)], label="runs", name="runs"
    )
    found = Reader(page)
    assert found.tags[1] == ("table", {"id": "runs"})
    assert ("button", {"type": "button"}) in found.tags
    assert ("tr", {"class": "differs"}) in found.tags

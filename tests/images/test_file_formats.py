"""The table of formats, compared with what Pillow writes and reads."""

import io

import pytest
from PIL import Image

from flambeau.images.decode import FORMATS
from flambeau.images.file_formats import ENDINGS, format_of


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_pillow_writes_is_named(name):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, name)
    assert format_of(file.getvalue()).upper() == name


def test_a_file_that_pillow_writes_as_bigtiff_is_a_tiff():
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "TIFF", big_tiff=True)
    assert file.getvalue()[:4] == b"II+\0"
    assert format_of(file.getvalue()) == "TIFF"


def test_pillow_knows_each_ending():
    known = Image.registered_extensions()
    for name, endings in ENDINGS.items():
        assert {known[ending] for ending in endings} - {"MPO"} == {name.upper()}


@pytest.mark.parametrize("data", [b"", b"P7 8 8", b"GIF", b"\xff\xd8"])
def test_other_bytes_have_no_format(data):
    assert format_of(data) == ""

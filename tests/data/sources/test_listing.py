"""Listings of every kind, and those that the csv module and im2rec write; each complaint; parts of data."""

import csv
import os
import pickle
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from flambeau.data.sources.listing import ListingSource, open_listing
from flambeau.data.sources.open_data import open_source, open_sources
from flambeau.data.sources.targets import TargetChoice
from flambeau.errors import InputError

# Python 3.12 warns where a process with threads, such as torch's own, forks.
not_our_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def put(folder, name, text, images=("a.jpg", "b.jpg", "c.jpg")):
    for image in images:
        path = folder / image
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"bytes of {image}".encode())
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def complaint(path, function=ListingSource):
    """The message of the InputError, checked to be one or two lines that name the file."""
    with pytest.raises(InputError) as caught:
        function(path)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 2
    assert str(path) in message
    return message


def rows_of(source):
    return [
        (name, source.classes[label])
        for name, label in zip(source.names, source.labels, strict=True)
    ]


# --- what is read

PLAIN = [("a.jpg", "cat"), ("b.jpg", "dog"), ("c.jpg", "cat")]
LISTINGS = {
    "no header": ("l.csv", "a.jpg,cat\nb.jpg,dog\nc.jpg,cat\n"),
    "header": ("l.csv", "path,label\na.jpg,cat\nb.jpg,dog\nc.jpg,cat"),
    "other order": ("l.csv", "class,filename\ncat,a.jpg\ndog,b.jpg\ncat,c.jpg\n"),
    "other columns": ("l.csv", ",Target,width,Image\n0,cat,3,a.jpg\n1,dog,4,b.jpg\n2,cat,,c.jpg\n"),
    "names that many use": ("l.csv", "Image_Path,Labels\na.jpg,cat\nb.jpg,dog\nc.jpg,cat\n"),
    "Chinese": ("l.csv", "图片,类别\na.jpg,cat\nb.jpg,dog\nc.jpg,cat\n"),
    "Windows": ("l.csv", b"\xef\xbb\xbfpath,label\r\na.jpg,cat\r\nb.jpg,dog\r\nc.jpg,cat\r\n"),
    "old Mac": ("l.csv", "path,label\ra.jpg,cat\rb.jpg,dog\rc.jpg,cat"),
    "blank lines": ("l.csv", "\n\npath,label\n\na.jpg,cat\n,\nb.jpg,dog\n \nc.jpg,cat\n\n"),
    "blanks": ("l.csv", " path , label \n a.jpg , cat\nb.jpg,dog \n c.jpg, \"cat\"\n"),
    "quotes": ("l.csv", '"path","label"\n"a.jpg","cat"\nb.jpg,"dog"\n"c.jpg",cat\n'),
    "semicolons": ("l.csv", "path;label\na.jpg;cat\nb.jpg;dog\nc.jpg;cat\n"),
    "tabs in a csv": ("l.CSV", "path\tlabel\na.jpg\tcat\nb.jpg\tdog\nc.jpg\tcat\n"),
    "tsv": ("l.tsv", "a.jpg\tcat\nb.jpg\tdog\nc.jpg\tcat\n"),
    "tsv with header": ("l.TSV", "label\tfile\ncat\ta.jpg\ndog\tb.jpg\ncat\tc.jpg\n"),
    "lst": ("l.lst", "0\tcat\ta.jpg\n1\tdog\tb.jpg\n2\tcat\tc.jpg\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTINGS)
def test_listings(tmp_path, name):
    path = put(tmp_path, *LISTINGS[name])
    source = ListingSource(path)
    assert rows_of(source) == PLAIN
    assert source.classes == ("cat", "dog")
    assert [source.read(i) for i in range(3)] == [
        f"bytes of {image}".encode() for image, _ in PLAIN
    ]
    line = (
        path.read_text("utf-8-sig").splitlines().index
    )  # of the whole line, in the file as others read it
    lines = [line(text) + 1 for text in path.read_text("utf-8-sig").splitlines() if "b.jpg" in text]
    assert source.describe(1) == f"{tmp_path / 'b.jpg'} ({path}, line {lines[0]})"
    assert source.parts is None


def test_paths_and_words_that_need_quotes(tmp_path):
    """What the csv module writes, in each of its dialects of quoting."""
    draw = random.Random(0)
    words = ["a, b", 'say "x"', "it's", "ü 图", "semi;colon", "#hash", "'", "50%"]
    names = [word for word in words if ";" not in word]  # which is two labels
    rows = [
        (f"{draw.choice(words)}/{i}, {draw.choice(words)}.png", draw.choice(names))
        for i in range(60)
    ]
    for quoting in (csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC):
        with (tmp_path / "l.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=quoting).writerows([("path", "label"), *rows])
        put(tmp_path, "x", "", [name for name, _ in rows])
        source = ListingSource(tmp_path / "l.csv")
        assert rows_of(source) == rows
        assert [source.read(i).decode() for i in range(60)] == [
            f"bytes of {name}" for name, _ in rows
        ]


def test_the_list_of_im2rec(tmp_path):
    """Its write_list: index, label as %f, path; in the order of a shuffle."""
    rows = [(7, 1, "dog/a b.jpg"), (2, 0, 'cat/"x.jpg'), (5, 11, "eel/1.jpg")]
    text = "".join(f"{index}\t{label:f}\t{name}\n" for index, label, name in rows)
    source = ListingSource(put(tmp_path, "pets.lst", text, [name for _, _, name in rows]))
    assert source.labels.tolist() == [1, 0, 11]
    assert source.classes == tuple(map(str, range(12)))
    assert list(source.names) == [name for _, _, name in rows]
    assert source.read(1) == b'bytes of cat/"x.jpg'


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["3", "0", "1"], ["3", "0", "1"]),
        (["3.0", "0.000000", "1e0"], ["3", "0", "1"]),
        (["+3", "00", "01"], ["3", "0", "1"]),
        (["3", "0", "x"], ["3", "0", "x"]),  # digits beside letters, as EMNIST has them
        (["1.5", "0", "x"], ["1.5", "0", "x"]),
        (["nan", "0", "inf"], ["nan", "0", "inf"]),
    ],
)
def test_numbers_and_names(tmp_path, labels, expected):
    rows = zip(["a.jpg", "b.jpg", "c.jpg"], labels, strict=True)
    source = ListingSource(
        put(tmp_path, "l.csv", "".join(f"{name},{label}\n" for name, label in rows))
    )
    assert [label for _, label in rows_of(source)] == expected
    numbers = all(label.isdecimal() for label in expected)
    assert source.classes == (("0", "1", "2", "3") if numbers else tuple(sorted(expected)))


def test_names_of_numbered_classes(tmp_path):
    (tmp_path / "pets.classes.txt").write_text("cat\ndog\n")
    source = ListingSource(put(tmp_path, "pets_train.csv", "a.jpg,1\nb.jpg,0\n"))
    assert rows_of(source) == [("a.jpg", "dog"), ("b.jpg", "cat")]


def test_where_paths_start(tmp_path, monkeypatch):
    put(tmp_path, "sub/x", "", ["sub/b.jpg", "c.jpg"])
    absolute = tmp_path / "c.jpg"
    path = put(
        tmp_path / "sub", "l.csv", f"b.jpg,0\n../c.jpg,1\n{absolute},1\n./d.jpg,0\n", ["d.jpg"]
    )
    monkeypatch.chdir(path.parent)
    source = ListingSource(path.relative_to(path.parent))
    monkeypatch.chdir("/")
    assert source.names == ("b.jpg", "../c.jpg", str(absolute), "./d.jpg")
    assert [source.read(i)[-5:] for i in range(4)] == [b"b.jpg", b"c.jpg", b"c.jpg", b"d.jpg"]


def test_a_missing_image_is_a_bad_one(tmp_path):
    source = ListingSource(put(tmp_path, "l.csv", "path,label\nnone.jpg,0\nb.jpg,1\nsub,1\n"))
    (tmp_path / "sub").mkdir()
    assert source.describe(0) == f"{tmp_path}/none.jpg ({tmp_path}/l.csv, line 2)"
    with pytest.raises(FileNotFoundError):
        source.read(0)
    with pytest.raises(IsADirectoryError):
        source.read(2)


# --- without labels

UNLABELLED = {
    "a path a line": ("l.csv", "a.jpg\nb.jpg\na.jpg\n", ["", "", ""]),
    "a header": ("l.csv", "path\na.jpg\nb.jpg\na.jpg\n", ["", "", ""]),
    "other columns": ("l.tsv", "id\timage\n7\ta.jpg\n8\tb.jpg\n9\ta.jpg\n", ["", "", ""]),
    "some labels": ("l.csv", "image,label\na.jpg,2\nb.jpg,\na.jpg,dog\n", ["2", "", "dog"]),
    "labels": ("l.csv", "a.jpg,2.0\nb.jpg,0\na.jpg,1\n", ["2", "0", "1"]),
    "a class called image": ("l.csv", "a.jpg,image\nb.jpg,x\na.jpg,x\n", ["image", "x", "x"]),
    "no class numbers": ("l.csv", "a.jpg,-1\nb.jpg,0.25\na.jpg,0.25\n", ["-1", "0.25", "0.25"]),
    "lst": ("l.lst", "0\ta.jpg\n1\t3\t4.5\tb.jpg\n2\tcat\ta.jpg\n", ["", "", "cat"]),
}


@pytest.mark.parametrize("name", UNLABELLED)
def test_labels_may_be_missing_where_nothing_is_learnt(tmp_path, name):
    file, content, labels = UNLABELLED[name]
    path = put(tmp_path, file, content)
    source = ListingSource(path, labelled=False)
    assert rows_of(source) == list(zip(["a.jpg", "b.jpg", "a.jpg"], labels, strict=True))
    with pytest.raises(InputError):  # of what is to be learnt from
        ListingSource(path)


def test_a_class_that_the_list_of_classes_lacks_is_no_matter_where_nothing_is_learnt(tmp_path):
    (tmp_path / "l.classes.txt").write_text("cat\ndog\n")
    path = put(tmp_path, "l.csv", "a.jpg,1\nb.jpg,7\n")
    assert rows_of(ListingSource(path, labelled=False)) == [("a.jpg", "1"), ("b.jpg", "7")]
    path = put(tmp_path, "l.csv", "a.jpg,1\nb.jpg,0\n")
    assert rows_of(ListingSource(path, labelled=False)) == [("a.jpg", "dog"), ("b.jpg", "cat")]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("l.csv", "", "holds no images"),
        ("l.csv", "name,id\nx,1\n", "line 1 is no header that names path, nor an image"),
        ("l.csv", "path,id\na.jpg,1\n,2\n", "line 3 has no path"),
        ("l.csv", "a.jpg,cat,3\n", "line 1 is no header"),
        ("l.lst", "a.jpg\n", "Expected index and path"),
        ("l.csv", "path\nhttps://x/a.jpg\n", "line 2 is a URL"),
    ],
)
def test_what_is_refused_without_labels(tmp_path, file, content, reason):
    with pytest.raises(InputError, match=reason):
        ListingSource(put(tmp_path, file, content), labelled=False)


# --- what is refused

BAD = {
    "nothing": ("l.csv", "", "holds no images"),
    "a header alone": ("l.csv", "path,label\n", "holds no images"),
    "an empty lst": ("l.lst", "\n\n", "holds no images"),
    "all missing": ("l.csv", "path,label\nx/1.jpg,0\nx/2.jpg,1\n",
                    "line 2) does not exist, nor does any other of the 2 listed images\nPaths start at"),
    "paths of Windows": ("l.csv", "path,label\nx\\1.jpg,0\n",
                         "l.csv, line 2) does not exist\nWrite / for each \\ of Windows; paths start"),
    "one missing": ("l.csv", "path,label\nx/1.jpg,0\n", "l.csv, line 2) does not exist\nPaths start"),
    "unknown header": ("l.csv", "id,breed\na,beagle\n",
                       "line 1 is no header that names path and label, nor an image and its class: 'id |"),
    "header without label": ("l.csv", "path,breed\na.jpg,beagle\n",
                            "line 1 names no column of labels (others: breed)"),
    "label first": ("l.csv", "cat,a.jpg\n", "line 1 is no header"),
    "three columns": ("l.csv", "a.jpg,cat,train\n", "line 1 is no header"),
    "paths alone": ("l.csv", "a.jpg\nb.jpg\n", "line 1 is no header"),
    "two labels": ("l.csv", "path,label,Label\na.jpg,0,1\n", "line 1 names two columns label"),
    "a value more": ("l.csv", "path,label\na.jpg,cat\n\nb.jpg,d,og\n",
                     "line 4 has 3 values, line 1 has 2\nA value that holds a comma stands in quotes"),
    "a value less": ("l.csv", "path,label\na.jpg,cat\nb.jpg\n", "line 3 has 1 values, line 1 has 2"),
    "no label": ("l.csv", "path,label\na.jpg,\n", "line 2 has no label"),
    "no path": ("l.csv", "path,label\na.jpg,1\n,cat\n", "line 3 has no path"),
    "open quote": ("l.csv", 'path,label\na.jpg,"cat\nb.jpg,dog\n', "line 2: unexpected end of data"),
    "broken quote": ("l.csv", 'path,label\na.jpg,cat\n"b"x.jpg,dog\n', "line 3: ',' expected after '\"'"),
    "a huge value": ("l.csv", "path,label\na.jpg,cat\n" + "b" * 200_000 + ",dog\n",
                     "line 3: field larger than field limit"),
    "line break": ("l.csv", 'path,label\n"a\nb.jpg",cat\n', "line 2 has a line break or control character"),
    "zero": ("l.csv", "path,label\na\0b.jpg,cat\n", "line 2 has a line break or control character"),
    "url": ("l.csv", "path,label\nhttps://example.org/a.jpg,cat\n", "line 2 is a URL"),
    "twice": ("l.csv", "a.jpg,cat\nb.jpg,cat\na.jpg,cat\n", "line 3 lists a.jpg again, after line 1"),
    "twice in other words": ("l.csv", "a.jpg,cat\n./x/../a.jpg,dog\n", "line 2 lists ./x/../a.jpg again"),
    "below zero": ("l.csv", "a.jpg,1\nb.jpg,-1\n", "line 2), column 2: label -1"),
    "huge": ("l.csv", "a.jpg,1\nb.jpg,1e999\n", "line 2), column 2: label 1e999"),
    "large": ("l.csv", "a.jpg,1\nb.jpg,16777216\n", "line 2), column 2: label 16777216"),
    "of persons": ("l.csv", "a.jpg,1\nb.jpg,9007199\nc.jpg,1\n",
                   "line 2), column 2: label 9007199, and only 2 labels are different\n"),
    "unknown part": ("l.csv", "path,label,split\na.jpg,1,train\nb.jpg,1,hold\n",
                     "line 3: 'hold' is no part of the data\nExpected one of train,"),
    "no part": ("l.csv", "path,label,split\na.jpg,1,\n", "line 2: '' is no part"),
    "Latin-1": ("l.csv", "é.jpg,cat\n".encode("latin-1"), "is not UTF-8 text"),
    "UTF-16": ("l.csv", "a.jpg,cat\n".encode("utf-16"), "is not UTF-8 text"),
    "an image": ("l.csv", b"\xff\xd8\xff\xe0" + bytes(2000), "is not UTF-8 text"),
    "lst of two": ("l.lst", "0\t1\ta.jpg\n0\tb.jpg\n", "line 2: '0 b.jpg'\nExpected index, label and path"),
    "lst with commas": ("l.lst", "a.jpg,1\n", "line 1: 'a.jpg,1'\nExpected index"),
    "lst without index": ("l.lst", "a.jpg\t1\tb.jpg\n", "line 1: 'a.jpg 1 b.jpg'\nExpected index"),
    "lst of several": ("l.lst", "0\t1\t0.5\t2\ta.jpg\n", "line 1 has 3 labels, which may be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(tmp_path, name):
    file, text, reason = BAD[name]
    assert reason in complaint(put(tmp_path, file, text))


def test_a_listing_that_cannot_be_read(tmp_path):
    assert "cannot be read: no such file or directory" in complaint(tmp_path / "l.csv")
    assert "cannot be read: is a directory" in complaint(tmp_path)


def test_damage(tmp_path):
    """Bits at random: it opens or complains, and never anything else."""
    good = "path,label,split\n" + "".join(
        f'"{name}",{i % 2},train\n' for i, name in enumerate("abc")
    )
    put(tmp_path, "x", "", ["a", "b", "c"])
    draw = random.Random(0)
    opened = 0
    for _ in range(300):
        data = bytearray(good.encode())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "l.csv").write_bytes(
            data[: draw.choice([None, None, draw.randrange(len(data))])]
        )
        with suppress(InputError):
            source = ListingSource(tmp_path / "l.csv")
            opened += 1
            for index in range(len(source)):
                with suppress(OSError):
                    source.read(index)
    assert 30 < opened < 270


# --- parts

SPLIT = "path,label,Split\na.jpg,cat,train\nb.jpg,dog,{}\nc.jpg,dog,Train\nd.jpg,cat,{}\n"


@pytest.mark.parametrize(
    ("words", "val_names"),
    [
        (("val", "VALIDATION"), ["b.jpg", "d.jpg"]),
        (("test", "testing"), ["b.jpg", "d.jpg"]),
        (("val", "test"), ["b.jpg"]),  # what is kept for a last test is not looked at
        (("test", "dev"), ["d.jpg"]),
        (("training", "valid"), ["d.jpg"]),
    ],
)
def test_parts(tmp_path, words, val_names):
    path = put(tmp_path, "l.csv", SPLIT.format(*words), ["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    train, val = open_listing(path)
    assert train.classes == val.classes == ("cat", "dog")
    assert list(val.names) == val_names
    assert list(train.names) == ["a.jpg", *(["b.jpg"] if "training" in words else []), "c.jpg"]
    assert train.describe(len(train) - 1) == f"{tmp_path}/c.jpg ({path}, line 4)"
    assert [val.read(i).decode() for i in range(len(val))] == [
        f"bytes of {name}" for name in val_names
    ]
    assert val.labels.tolist() == [{"b.jpg": 1, "d.jpg": 0}[name] for name in val_names]


@pytest.mark.parametrize("part", ["train", "test"])
def test_one_part_alone_is_everything(tmp_path, part):
    text = f"path,label,split\na.jpg,0,{part}\nb.jpg,1,{part}\n"
    source, val = open_listing(put(tmp_path, "l.csv", text))
    assert val is None
    assert rows_of(source) == [("a.jpg", "0"), ("b.jpg", "1")]


# --- contracts of a source


def test_fingerprint(tmp_path):
    text = "a.jpg,0\nb.jpg,1\nnone.jpg,1\n"
    first = ListingSource(put(tmp_path / "one", "l.csv", text)).fingerprint
    assert ListingSource(put(tmp_path / "two", "m.csv", "path,label\n" + text)).fingerprint == first
    assert (
        ListingSource(
            put(tmp_path / "two", "l.csv", text.replace("b.jpg,1", "b.jpg,0"))
        ).fingerprint
        != first
    )
    assert (
        ListingSource(put(tmp_path / "two", "l.csv", text.replace("b.jpg", "c.jpg"))).fingerprint
        != first
    )
    sample = ListingSource(tmp_path / "one/l.csv").content_sample
    assert ListingSource(tmp_path / "two/m.csv").content_sample == sample
    (tmp_path / "two/b.jpg").write_bytes(bytes((tmp_path / "two/b.jpg").stat().st_size))
    assert ListingSource(tmp_path / "two/m.csv").content_sample != sample
    (tmp_path / "one/b.jpg").write_bytes(b"longer than before")
    assert ListingSource(tmp_path / "one/l.csv").fingerprint != first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@not_our_threads
def test_pickle_threads_and_fork(tmp_path):
    names = [f"x/{i}.jpg" for i in range(200)]
    path = put(
        tmp_path, "l.csv", "".join(f"{name},{i % 3}\n" for i, name in enumerate(names)), names
    )
    source = ListingSource(path)

    def right(source):
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(source.read, range(200))) == [
                f"bytes of {name}".encode() for name in names
            ]

    assert right(source)
    copy = pickle.loads(pickle.dumps(source))
    assert right(copy)
    assert (copy.names, copy.classes, copy.fingerprint) == (
        source.names,
        source.classes,
        source.fingerprint,
    )
    assert copy.describe(7) == source.describe(7)
    pid = os.fork()
    if pid == 0:
        good = False
        with suppress(Exception):
            good = right(source)
        os._exit(0 if good else 1)
    assert right(source)
    assert os.waitpid(pid, 0)[1] == 0


def test_training_on_a_listing(tmp_path, flambeau, make_images):
    make_images(tmp_path / "photos", per_class=20)
    names = [f"{name}/{i:02}.png" for name in "ab" for i in range(20)]
    text = "file,class\n" + "".join(f"{name},{name[0]}\n" for name in names)
    path = put(tmp_path / "photos", "all.csv", text, [])
    train, val = open_sources(path)
    assert (len(train), len(val), train.classes) == (36, 4, ("a", "b"))
    assert len(open_source(path, ["b", "a"])) == 40
    answer = flambeau(
        "train", path, "--duration 2st --batch-size 8 --device cpu --out", tmp_path / "run"
    )
    assert answer.code == 0, answer.err
    answer = flambeau("evaluate", tmp_path / "run", path, "--all")
    assert re.search(r"images +40, 8 x 8", answer.out)


# --- several numbers in a .lst


def test_a_list_of_im2rec_with_several_labels(tmp_path):
    """As its `--pack-label` takes them: rows of 0 and 1 that are not all one-hot."""
    text = "0\t1\t0\t1\ta.jpg\n1\t0\t0\t0\tb.jpg\n2\t0\t1\t0\tc.jpg\n"
    source = ListingSource(put(tmp_path, "l.lst", text, ["a.jpg", "b.jpg", "c.jpg"]))
    assert (source.task, source.classes) == ("multilabel", ("0", "1", "2"))
    assert source.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    put(tmp_path, "l.classes.txt", "red\ngreen\nblue\n", [])
    assert ListingSource(tmp_path / "l.lst").classes == ("red", "green", "blue")


def test_one_hot_rows_of_a_list_are_classes(tmp_path):
    text = "0\t0\t1\ta.jpg\n1\t1\t0\tb.jpg\n"
    source = ListingSource(put(tmp_path, "l.lst", text, ["a.jpg", "b.jpg"]))
    assert (source.task, source.labels.tolist()) == ("classification", [1, 0])


def test_numbers_of_a_list_are_learned_where_they_are_wanted(tmp_path):
    text = "0\t1.5\t20\ta.jpg\n1\t2.5\t30\tb.jpg\n"
    path = put(tmp_path, "l.lst", text, ["a.jpg", "b.jpg"])
    with pytest.raises(InputError, match=r"l\.lst, line 1 has 2 labels, which may be labels"):
        ListingSource(path)
    source = ListingSource(path, choice=TargetChoice("regression"))
    assert (source.task, source.classes) == ("regression", ("0", "1"))
    assert source.labels.tolist() == [[1.5, 20], [2.5, 30]]
    assert ListingSource(path, labelled=False).classes == ("",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0\t1\tcat\ta.jpg\n1\t0\t1\tb.jpg\n",
            "line 1 has 2 labels, and not all of them are numbers",
        ),
        ("0\t1\t0\ta.jpg\n1\t0\t1\t1\tb.jpg\n", "2"),
    ],
)
def test_uneven_lists_are_refused(tmp_path, text, message):
    path = put(tmp_path, "l.lst", text, ["a.jpg", "b.jpg"])
    with pytest.raises(InputError, match=message):
        ListingSource(path, choice=TargetChoice("multilabel"))

"""`flambeau certify`: the hashes of all that a run was made of and has left, in one file to be signed."""

import argparse
from pathlib import Path

from flambeau.cli.reading_flags import add_data_copy
from flambeau.cli.table import print_json
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.run.folder.store_run import run_here
from flambeau.terminal import print_text, say

HELP = "write the hashes of a run's data, settings, checkpoints and weights to a file that can be signed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", help="the folder of a run")
    add("--out", metavar="FILE", help="the file, a .json (default: RUN/certificate.json)")
    add_data_copy(parser)
    add(
        "--json",
        action="store_true",
        help="one JSON object: the file, its SHA-256, and its content",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the certificate, and say what it holds."""
    from flambeau.cli.written_file import check_file

    if arguments.out is None and is_address(arguments.path):
        raise InputError(f"{arguments.path} is in a store: name a file here with --out FILE.json")
    path = run_here(arguments.path, say)
    out = path / "certificate.json" if arguments.out is None else Path(arguments.out)
    if arguments.out is not None:
        check_file(
            "--out", out, endings=(".json",), what="a certificate is JSON", example="run.json"
        )
    import hashlib

    from flambeau.compare.audit import sources_of
    from flambeau.compare.certificate import PREDICATE, as_bytes, read_certificate, statement_of
    from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

    if out.exists():
        try:
            read_certificate(out)
        except InputError as error:
            raise InputError(f"{out} exists and is no certificate; give another --out") from error
    statement = statement_of(path, sources_of(path, arguments.data))
    content = as_bytes(statement)
    if out.exists() and out.read_bytes() != content:  # it may be signed
        raise InputError(
            f"{out} is the certificate of another state of the run: move it, or give another --out"
        )
    write_file(out, content)
    digest = hashlib.sha256(content).hexdigest()
    if arguments.json:
        print_json([{"file": str(out), "sha256": digest, "statement": statement}], readable=True)
        return 0
    predicate = statement["predicate"]
    kept = len(predicate["checkpoints"])
    print_text(f"{out}: {kept} checkpoints, {len(statement['subject'])} files ({PREDICATE})")
    print_text(f"sha256 {digest}")
    if "not_shown" in predicate:
        print_text(predicate["not_shown"])
    elif not predicate["data"]["images"]:
        print_text(
            "the data are a function in a file: it was not run, and their bytes have no hash"
        )
    return 0

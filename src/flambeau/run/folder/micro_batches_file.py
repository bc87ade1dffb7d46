"""micro_batches.json of a run folder: how many samples at once have fitted, if fewer than the settings say.

It is state of the run and no setting of it: a step has the same samples whatever stands there. Whoever
removes the file lets the next start begin with what the settings say.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from flambeau.errors import InputError, unreadable
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.folder.json_file import json_file, whole_number

FILE = "micro_batches.json"


@dataclass(frozen=True)
class MicroBatches:
    """What a run had to come down to.

    Attributes:
        step: in which memory ran out last, from 1; 0 if it never has.
        training: samples per forward pass, of all processes together; None for what the settings say.
        evaluation: samples per forward pass of an evaluation, in each process; None for all of a batch.
    """

    step: int = 0
    training: int | None = None
    evaluation: int | None = None

    @classmethod
    def read(cls, folder: Path) -> "MicroBatches":
        """What a run folder says; where there is no file, nothing was halved.

        Raises:
            InputError: the file cannot be read, or holds something else.
        """
        path = folder / FILE
        try:
            row = json_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise InputError(
                f"{path} cannot be read: {error}; remove it to start from the settings"
            ) from None
        names = [field.name for field in dataclasses.fields(cls)]
        good = isinstance(row, dict) and row.keys() == set(names)
        good = good and whole_number(row["step"]) is not None
        if not good or not all(row[name] is None or whole_number(row[name]) for name in names[1:]):
            raise InputError(
                f"{path} is not what a run writes; remove it to start from the settings"
            )
        return cls(**row)

    def as_json(self) -> str:
        """All of it, in one line."""
        return json.dumps(dataclasses.asdict(self))

    def write(self, folder: Path) -> None:
        """Put it into a run folder."""
        write_file(folder / FILE, self.as_json().encode() + b"\n")

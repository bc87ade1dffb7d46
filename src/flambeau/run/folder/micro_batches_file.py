"""micro_batches.json of a run folder: the batch sizes that fit into memory, if smaller than the settings say.

They are state, not a setting: a step has the same samples with any of them. If the file is removed, the next
start begins with the settings.
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
    """Batch sizes after memory ran out.

    Attributes:
        step: last step that ran out of memory, from 1; 0 if none.
        training: samples per forward pass of all processes; None: as set.
        evaluation: samples per forward pass and process; None: the whole batch.
    """

    step: int = 0
    training: int | None = None
    evaluation: int | None = None

    @classmethod
    def read(cls, folder: Path) -> "MicroBatches":
        """Read a run folder; without the file, sizes are as the settings say."""
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
        return json.dumps(dataclasses.asdict(self))

    def write(self, folder: Path) -> None:
        write_file(folder / FILE, self.as_json().encode() + b"\n")

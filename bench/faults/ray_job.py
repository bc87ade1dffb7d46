"""A small search with Ray Tune, for bench/faults/ray_kills.py, in a Python that has Ray and no flambeau.

    python ray_job.py FOLDER

The same command again continues it by `Tuner.restore`, as Ray's guide does. ASHA stops trials early; they
run one at a time, since with several at once Ray's choice depends on the clock. Each trained epoch is a line
of FOLDER/epochs.jsonl; the results are in FOLDER/results.json once the search is over.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TRIALS = 12
EPOCHS = 8
SEED = 3
_EPOCH_S = 0.25
_CHECKPOINT = "state.json"


def train(settings: dict[str, Any]) -> None:
    """Descend a parabola, an epoch per step, with a checkpoint after each."""
    from ray import tune

    point, epoch = 1.0, 0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            point, epoch = json.loads((Path(folder) / _CHECKPOINT).read_text())
    while epoch < EPOCHS:
        time.sleep(_EPOCH_S)
        point -= settings["lr"] * 2 * point
        epoch += 1
        line = {"lr": settings["lr"], "mixup": settings["mixup"], "epoch": epoch}
        _append(Path(settings["folder"]) / "epochs.jsonl", line)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _CHECKPOINT).write_text(json.dumps([point, epoch]))
            loss = point**2 + settings["mixup"] / 10
            tune.report({"loss": loss}, checkpoint=tune.Checkpoint.from_directory(folder))


def _append(file: Path, line: dict[str, Any]) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, (json.dumps(line) + "\n").encode())
    os.close(fd)


def tuner(folder: Path) -> Any:
    """A new search, or the one that was killed."""
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.basic_variant import BasicVariantGenerator

    place = folder / "results" / "search"
    if tune.Tuner.can_restore(str(place)):
        return tune.Tuner.restore(str(place), train, resume_unfinished=True, resume_errored=True)
    space = {
        "lr": tune.loguniform(1e-3, 0.4),
        "mixup": tune.uniform(0.0, 0.4),
        "folder": str(folder),
    }
    return tune.Tuner(
        train,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=TRIALS,
            search_alg=BasicVariantGenerator(random_state=SEED, max_concurrent=1),
            scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=2),
        ),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(folder / "results"),
            failure_config=tune.FailureConfig(max_failures=-1),  # a killed trial is begun again
            verbose=0,
        ),
    )


def main() -> None:
    import ray

    folder = Path(sys.argv[1])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        _temp_dir=str(folder / "ray"),
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )
    results = [
        [
            one.config["lr"],
            one.config["mixup"],
            one.metrics["training_iteration"],
            one.metrics["loss"],
        ]
        for one in tuner(folder).fit()
    ]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

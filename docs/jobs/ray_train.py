"""Train on a Ray cluster, with the data and a mirror of the run in a bucket:  python ray_train.py

Set: the workers, the two addresses, what is passed to flambeau.train. Ray starts the ranks, and the function
finds itself among them. After a failure Ray starts all ranks again, and the run continues from its mirror.
"""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

BUCKET = os.environ.get("BUCKET", "s3://my-bucket")
WORKERS = int(os.environ.get("WORKERS", "2"))
USE_GPU = os.environ.get("USE_GPU", "1") == "1"


def train_rank(settings: dict) -> None:
    import flambeau

    flambeau.train(
        f"{BUCKET}/photos/photos.tar", out="run", mirror=f"{BUCKET}/runs/photos", **settings
    )


if __name__ == "__main__":
    TorchTrainer(
        train_rank,
        train_loop_config={"model": "resnet18", "epochs": 90},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=USE_GPU),
        run_config=RunConfig(name="photos", failure_config=FailureConfig(max_failures=3)),
    ).fit()

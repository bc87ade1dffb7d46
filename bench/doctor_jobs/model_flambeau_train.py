"""`flambeau train` of a ResNet-18 on small photographs, in float32."""

import shutil

import job
from flambeau.cli.command import main as flambeau
from flambeau.run.run import Run

CAUSE = "model"
WHERE = None
REMEDY = "bf16"
TRAINER = "flambeau train"


def main() -> None:
    told = job.begin(REMEDY, batches=(Run, "batches"))
    out = job.CACHE / "flambeau-train"
    shutil.rmtree(out, ignore_errors=True)
    words = ["train", f"{job.photos(160, 120, 6000)}", "--out", f"{out}", "--model", "resnet18"]
    words += ["--image-size", "96", "--batch-size", "16", "--epochs", "10", "--device", "cpu"]
    words += ["--precision", "bf16" if told.remedied else "fp32"]
    raise SystemExit(flambeau(words))


if __name__ == "__main__":
    main()

"""Masks by `flambeau train` and by its peers: accuracy, seconds, and what a kill in mid-epoch leaves.

    python bench/mask_peers.py --data fashion_mnist.npz [--lightly FOLDER] [--ultralytics FOLDER]
        [--images N] [--epochs N] [--rounds N] [--record]

--lightly and --ultralytics name folders into which `pip install --target FOLDER` has put `lightly-train`
(with pytorch_lightning, which the example of segmentation_models_pytorch uses, too) and `ultralytics`; a
peer without its folder is left out.

--data has Fashion-MNIST as bench/learning_other_tasks.py reads it. Of its articles images of 96 x 96 pixels
are made, one to four articles in each, with the class of each pixel: ten classes and the background.
Training and validation images are of other articles.

Contenders, each a command in a process of its own with one thread, all from random weights, as many epochs
of batches of 16, whatever else is their default:
- `flambeau`: `flambeau train DATA --model smp:Unet/resnet18`;
- `smp`: the example of segmentation_models_pytorch (examples/camvid_segmentation_multiclass.ipynb) for the
  same network: Lightning, DiceLoss, Adam at 2e-4 with a cosine; goes on with `fit(ckpt_path="last")`, of the
  `ModelCheckpoint(save_last=True)` that Lightning's page on checkpoints shows;
- `flambeau default`: `flambeau train DATA`, timm's ResNet-18 with the decoder of flambeau;
- `lightly`: `train_semantic_segmentation` of LightlyTrain with its smallest model that needs no download,
  `dinov3/vitt16-notpretrained-eomt`, and a checkpoint per epoch, as a training as short as this has none by
  default; goes on with `resume_interrupted=True`;
- `ultralytics`: `YOLO("yolo26n-sem.yaml").train`; goes on with `YOLO("last.pt").train(resume=True)`.

Each round trains a contender undisturbed, and once more with SIGKILL in the middle of an epoch, after which
it is started again by its own means. All rounds have one seed: whether two undisturbed runs have the same
weights says whether a difference after a kill is one of the kill. A line has the mean intersection over
union of the masks that the published weights predict for the validation images, by one scorer here over all
their pixels; seconds and processor seconds of the undisturbed training; the epochs that were done at the
kill; and whether the weights at the end are those of the undisturbed run, to the bit.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

SIDE, BATCH = 96, 16
CONTENDERS = ("flambeau", "smp", "flambeau default", "lightly", "ultralytics")
Command = list[str]


def make_data(source: Path, folder: Path, *, images: int) -> list[str]:
    """Images and masks in images/train, masks/train and so on; returns the names of the classes."""
    with np.load(source) as stored:
        arrays = {name: stored[name] for name in stored.files}
    draw = np.random.default_rng(0)
    half = SIDE // 2
    for part, count, of in (("train", images, "train"), ("val", images // 5, "test")):
        x, y = arrays[f"x_{of}"], arrays[f"y_{of}"]
        for kind in ("images", "masks"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(count):
            canvas, mask = np.zeros((2, SIDE, SIDE), np.uint8)
            for place in draw.permutation(4)[: draw.integers(1, 5)]:
                chosen = draw.integers(len(x))
                article = np.asarray(Image.fromarray(x[chosen]).resize((half, half)))
                top, left = half * (place // 2), half * (place % 2)
                canvas[top : top + half, left : left + half] = article
                there = np.where(article > 20, y[chosen] + 1, 0)
                mask[top : top + half, left : left + half] = there
            picture = Image.fromarray(canvas).convert("RGB")
            picture.save(folder / "images" / part / f"{number:05}.png")
            Image.fromarray(mask).save(folder / "masks" / part / f"{number:05}.png")
    names = ["nothing", *map(str, arrays["classes"])]
    (folder / "classes.txt").write_text("\n".join(names))
    return names


# ---------------------------------------------------------------- the contenders, each in its own process


def train_smp(data: Path, out: Path, names: list[str], *, epochs: int, again: bool) -> None:
    """As the example of segmentation_models_pytorch."""
    import pytorch_lightning as pl
    import segmentation_models_pytorch as smp
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Pairs(torch.utils.data.Dataset[Any]):
        def __init__(self, part: str) -> None:
            self.files = sorted((data / "images" / part).iterdir())
            self.masks = data / "masks" / part

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> Any:
            path = self.files[index]
            image = np.array(Image.open(path)).transpose(2, 0, 1)
            return image, np.array(Image.open(self.masks / path.name)).astype(np.int64)

    class Camvid(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = smp.Unet("resnet18", encoder_weights=None, classes=len(names))
            self.loss = smp.losses.DiceLoss(smp.losses.MULTICLASS_MODE, from_logits=True)
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))

        def forward(self, image: torch.Tensor) -> Any:
            return self.model((image / 255 - self.mean) / self.std)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.loss(self(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid_loss", self.loss(self(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=2e-4)
            steps = epochs * -(-len(train) // BATCH)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=steps, eta_min=1e-5
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    pl.seed_everything(0)
    train, val = Pairs("train"), Pairs("val")
    loaders = [
        torch.utils.data.DataLoader(one, batch_size=BATCH, shuffle=one is train)
        for one in (train, val)
    ]
    kept = ModelCheckpoint(dirpath=out / "kept", save_last=True)
    trainer = pl.Trainer(
        max_epochs=epochs, log_every_n_steps=1, default_root_dir=out, callbacks=[kept],
        accelerator="cpu", enable_progress_bar=False,
    )  # fmt: skip
    model = Camvid()
    trainer.fit(model, *loaders, ckpt_path="last" if again else None)
    torch.save(model.model.state_dict(), out / "weights.pt")
    model.eval()
    (out / "masks").mkdir(exist_ok=True)
    with torch.inference_mode():
        for images, name in ((val[k][0], val.files[k].name) for k in range(len(val))):
            logits = model(torch.from_numpy(images)[None])
            Image.fromarray(logits[0].argmax(0).byte().numpy()).save(out / "masks" / name)


def train_lightly(
    data: Path, out: Path, names: list[str], *, epochs: int, images: int, again: bool
) -> None:
    """As LightlyTrain's page on semantic segmentation."""
    import lightly_train

    parts = {
        part: {"images": str(data / "images" / part), "masks": str(data / "masks" / part)}
        for part in ("train", "val")
    }
    lightly_train.train_semantic_segmentation(
        out=out / "run", model="dinov3/vitt16-notpretrained-eomt", accelerator="cpu", num_workers=0,
        data={**parts, "classes": dict(enumerate(names))}, batch_size=BATCH,
        steps=epochs * (images // BATCH), resume_interrupted=again,
        save_checkpoint_args={"save_every_num_steps": images // BATCH},
        transform_args={"image_size": (SIDE, SIDE)},
    )  # fmt: skip


def predict_lightly(data: Path, out: Path) -> None:
    import lightly_train

    folder = out / "run" / "exported_models"
    chosen = [*folder.glob("*best*.pt"), *folder.glob("*.pt")][0]
    model = lightly_train.load_model(chosen)
    (out / "masks").mkdir(exist_ok=True)
    for path in sorted((data / "images" / "val").iterdir()):
        mask = model.predict(path).byte().cpu().numpy()
        Image.fromarray(mask).save(out / "masks" / path.name)


def train_ultralytics(data: Path, out: Path, names: list[str], *, epochs: int, again: bool) -> None:
    """As Ultralytics' page on semantic segmentation."""
    from ultralytics import YOLO

    listed = "\n".join(f"  {number}: {name!r}" for number, name in enumerate(names))
    about = (
        f"path: {data}\ntrain: images/train\nval: images/val\nmasks_dir: masks\nnames:\n{listed}\n"
    )
    (out / "data.yaml").write_text(about)
    if again:
        YOLO(out / "run" / "weights" / "last.pt").train(resume=True)
        return
    YOLO("yolo26n-sem.yaml").train(
        data=str(out / "data.yaml"), epochs=epochs, imgsz=SIDE, batch=BATCH, device="cpu", workers=0,
        project=str(out), name="run", exist_ok=True, seed=0,
    )  # fmt: skip


def predict_ultralytics(data: Path, out: Path) -> None:
    from ultralytics import YOLO

    model = YOLO(out / "run" / "weights" / "best.pt")
    (out / "masks").mkdir(exist_ok=True)
    for path in sorted((data / "images" / "val").iterdir()):
        found = model.predict(path, imgsz=SIDE, device="cpu", verbose=False)[0]
        mask = torch.as_tensor(found.semantic_mask.data).squeeze().byte().cpu().numpy()
        Image.fromarray(mask).save(out / "masks" / path.name)


# ---------------------------------------------------------------- measuring


def command(
    contender: str, data: Path, out: Path, told: argparse.Namespace, *, again: bool
) -> Command:
    """How a contender is started, and how it is started again."""
    if contender.startswith("flambeau"):
        model = ["--model", "smp:Unet/resnet18"] if contender == "flambeau" else []
        words = [
            "--epochs",
            f"{told.epochs}",
            "--batch-size",
            f"{BATCH}",
            "--image-size",
            f"{SIDE}",
        ]
        return ["-m", "flambeau", "train", f"{data}", "--out", f"{out / 'run'}", *words, *model]
    words = [
        str(Path(__file__).resolve()),
        "--only",
        contender,
        "--work",
        f"{data}",
        "--out",
        f"{out}",
    ]
    words += ["--epochs", f"{told.epochs}", "--images", f"{told.images}"]
    return [*words, *["--again"] * again]


def epochs_done(contender: str, out: Path) -> int | None:
    """As its files say; None if they do not."""
    run = out / "run"
    if contender.startswith("flambeau"):
        path = run / "metrics.jsonl"
        return path.read_text().count('"val_miou"') if path.exists() else 0
    if contender == "smp":
        kept = [one.name for one in (out / "kept").glob("epoch=*.ckpt")]
        return max((int(name.split("=")[1].split("-")[0]) + 1 for name in kept), default=0)
    if contender == "ultralytics":
        path = run / "results.csv"
        return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0
    return None


def weights_digest(contender: str, out: Path) -> str:
    """SHA-256 of the tensors at the end of a training."""
    if contender.startswith("flambeau"):
        from safetensors.torch import load_file

        last = sorted((out / "run" / "checkpoints").iterdir())[-1]
        tensors = load_file(last / "model.safetensors")
    elif contender == "smp":
        tensors = torch.load(out / "weights.pt")
    elif contender == "lightly":
        folder = out / "run" / "exported_models"
        kept = torch.load(folder / "exported_last.pt", map_location="cpu", weights_only=False)
        tensors = kept.get("train_model", kept)
    else:
        kept = torch.load(out / "run" / "weights" / "last.pt", weights_only=False)
        tensors = (kept.get("ema") or kept["model"]).state_dict()
    digest = hashlib.sha256()
    kept = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    assert len(kept) > 10
    for name, value in sorted(kept.items()):
        digest.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def started(words: Command, told: argparse.Namespace, log: Path) -> subprocess.Popen[bytes]:
    contender = words[words.index("--only") + 1] if "--only" in words else ""
    folder = {"lightly": told.lightly, "smp": told.lightly, "ultralytics": told.ultralytics}
    core = sorted(os.sched_getaffinity(0))[-1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "YOLO_OFFLINE": "1"}
    # Behind the environment's own packages, so that torch is the same for all.
    env["MASK_PEERS_PATH"] = str(folder.get(contender) or "")
    with log.open("ab") as file:
        return subprocess.Popen(
            ["taskset", "-c", str(core), sys.executable, *words],
            stdout=file, stderr=file, env=env, start_new_session=True, cwd=log.parent,
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait():
        raise RuntimeError(
            f"{process.args} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        )


def undisturbed(contender: str, data: Path, out: Path, told: argparse.Namespace) -> dict[str, Any]:
    out.mkdir()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    ended(started(command(contender, data, out, told, again=False), told, out / "log"), out / "log")
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "miou": miou(contender, data, out, told), "seconds": round(seconds, 1),
        "processor_s": round(spent, 1), "weights": weights_digest(contender, out),
    }  # fmt: skip


def killed(
    contender: str, data: Path, out: Path, told: argparse.Namespace, *, usual_s: float
) -> dict[str, Any]:
    """SIGKILL in the middle of the epoch after half of them, or after half of the time; then again."""
    out.mkdir()
    process = started(command(contender, data, out, told, again=False), told, out / "log")
    began = time.perf_counter()
    half = told.epochs // 2
    while process.poll() is None:
        passed_s, done = time.perf_counter() - began, epochs_done(contender, out)
        if passed_s > 0.6 * usual_s if done is None else done >= half:
            break
        time.sleep(0.05)
    time.sleep(0.4 * usual_s / (told.epochs + 2))
    done = epochs_done(contender, out)
    if process.poll() is not None:
        raise RuntimeError(f"{contender} ended before it was killed: {(out / 'log').read_text()}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    start = time.perf_counter()
    again = started(command(contender, data, out, told, again=True), told, out / "log2")
    goes_on = not again.wait()
    row: dict[str, Any] = {"epochs_at_kill": done, "goes_on": goes_on}
    if not goes_on:
        return {**row, "says": (out / "log2").read_text().strip().splitlines()[-1][:300]}
    return {
        **row, "seconds_after_kill": round(time.perf_counter() - start, 1),
        "weights": weights_digest(contender, out), "miou": miou(contender, data, out, told),
    }  # fmt: skip


def miou(contender: str, data: Path, out: Path, told: argparse.Namespace) -> float:
    """Of the masks that the published weights predict, over the pixels of all validation images."""
    masks = out / "masks"
    if contender.startswith("flambeau"):
        words = ["-m", "flambeau", "predict", f"{out / 'run'}", f"{data / 'images' / 'val'}"]
        ended(started([*words, "--masks", f"{masks}"], told, out / "log"), out / "log")
    elif contender != "smp":
        words = [
            str(Path(__file__).resolve()),
            "--only",
            contender,
            "--predict",
            "--work",
            f"{data}",
            "--out",
            f"{out}",
        ]
        ended(started(words, told, out / "log"), out / "log")
    num = len((data / "classes.txt").read_text().splitlines())
    pairs: NDArray[np.int64] = np.zeros((num, num), np.int64)
    given = sorted((data / "masks" / "val").iterdir())
    for path in given:
        found = next(masks.rglob(path.name))
        both = np.asarray(Image.open(path)).astype(np.int64) * num + np.asarray(Image.open(found))
        pairs += np.bincount(both.ravel(), minlength=num * num).reshape(num, num)
    right = pairs.diagonal()
    union = pairs.sum(0) + pairs.sum(1) - right
    return round(float((right / np.where(union, union, 1))[union > 0].mean()), 4)


def run_alone(told: argparse.Namespace) -> None:
    """The process of one contender."""
    if os.environ.get("MASK_PEERS_PATH"):
        sys.path.append(os.environ["MASK_PEERS_PATH"])
    torch.set_num_threads(1)
    names = (told.work / "classes.txt").read_text().splitlines()
    common = {"epochs": told.epochs, "again": told.again}
    if told.only == "smp":
        train_smp(told.work, told.out, names, **common)
    elif told.only == "lightly" and told.predict:
        predict_lightly(told.work, told.out)
    elif told.only == "lightly":
        train_lightly(told.work, told.out, names, images=told.images, **common)
    elif told.predict:
        predict_ultralytics(told.work, told.out)
    else:
        train_ultralytics(told.work, told.out, names, **common)


def versions(told: argparse.Namespace) -> dict[str, str]:
    sys.path += [str(one) for one in (told.lightly, told.ultralytics) if one]
    found = {"smp": version("segmentation_models_pytorch")}
    if told.lightly:
        found |= {name: version(name) for name in ("lightly-train", "pytorch_lightning")}
    if told.ultralytics:
        found["ultralytics"] = version("ultralytics")
    return found


def summary(contender: str, rows: list[dict[str, Any]], shared: dict[str, Any]) -> dict[str, Any]:
    """Medians, and what became of the kills."""
    plain, kills = ([row[kind] for row in rows] for kind in ("undisturbed", "killed"))
    again = [row for row in kills if row["goes_on"]]
    return {
        "contender": contender, "rounds": len(rows),
        **{
            name: round(statistics.median(row[name] for row in plain), 4)
            for name in ("miou", "seconds", "processor_s")
        },
        "undisturbed_runs_equal": len({row["weights"] for row in plain}) == 1 if len(rows) > 1 else None,
        "kills": len(kills), "went_on": len(again),
        "epochs_at_kill": [row["epochs_at_kill"] for row in kills],
        "same_bits_after_kill": sum(
            one["killed"].get("weights") == one["undisturbed"]["weights"] for one in rows
        ),
        "miou_after_kill": [row["miou"] for row in again],
        "says": [row["says"] for row in kills if "says" in row], **shared,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--lightly", type=Path)
    parser.add_argument("--ultralytics", type=Path)
    parser.add_argument("--images", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--record", action="store_true")
    for name in ("--only", "--work", "--out"):
        kind = str if name == "--only" else Path
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    for name in ("--again", "--predict"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    told.lightly = told.lightly and told.lightly.resolve()
    told.ultralytics = told.ultralytics and told.ultralytics.resolve()
    if told.only:
        run_alone(told)
        return 0
    from provenance import commit, cpu_model, record

    shared = {
        "images": told.images, "epochs": told.epochs, "torch": torch.__version__, **versions(told),
        "cpu": cpu_model(), "commit": commit(),
        "command": " ".join(["python", "bench/mask_peers.py", *sys.argv[1:]]),
    }  # fmt: skip
    needs = {"lightly": told.lightly, "smp": told.lightly, "ultralytics": told.ultralytics}
    chosen = [one for one in told.contenders.split(",") if needs.get(one, True)]
    rows: dict[str, list[dict[str, Any]]] = {one: [] for one in chosen}
    with tempfile.TemporaryDirectory(prefix="mask_peers_") as name:
        make_data(told.data, Path(name) / "data", images=told.images)
        for number in range(told.rounds):
            for contender in random.Random(number).sample(chosen, len(chosen)):
                data, out = Path(name) / "data", Path(name) / f"{number} {contender}"
                plain = undisturbed(contender, data, out, told)
                kill = killed(
                    contender, data, Path(f"{out} killed"), told, usual_s=plain["seconds"]
                )
                rows[contender].append({"undisturbed": plain, "killed": kill})
                row = {"contender": contender, "round": number, **rows[contender][-1]}
                print(json.dumps(row), flush=True)
    for contender, of in rows.items():
        record(summary(contender, of, shared), __file__, keep=told.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A GAN: two networks, each with its own optimizer, and a distance between real and generated images.

    python examples/gan.py                                        # on digits that it draws itself
    python examples/gan.py --data photos/                         # on your own, made 28 x 28 and grey

Kill it and start it again: it continues to the same bits.

`Run` trains and publishes the generator. The discriminator and its optimizer are saved with it by `state=`,
and are stepped here, before `run.step`. What is not finite in either of the two networks stops the run.
One process: the gradients of the discriminator would not be shared.
"""

import argparse
import hashlib
import os
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, softplus
from torch.utils.data import TensorDataset

from flambeau import Run
from flambeau.recipes.training.amp_step import AmpStep

NOISE = 64  # numbers that an image is made of
SIZE = 28


def draw_digits(num_images: int) -> Tensor:
    """White digits on black, each of another size, turned and moved: (N, 1, 28, 28) uint8."""
    draw = random.Random(0)
    fonts = [ImageFont.load_default(size) for size in range(19, 27)]
    pixels = np.empty((num_images, 1, SIZE, SIZE), np.uint8)
    for number in range(num_images):
        image = Image.new("L", (SIZE, SIZE))
        place = (SIZE / 2 + draw.uniform(-2, 2), SIZE / 2 + draw.uniform(-2, 2))
        digit = str(draw.randrange(10))
        ImageDraw.Draw(image).text(place, digit, 255, draw.choice(fonts), anchor="mm")
        pixels[number, 0] = image.rotate(draw.uniform(-15, 15), Image.Resampling.BILINEAR)
    return torch.from_numpy(pixels)


def read_images(folder: Path) -> Tensor:
    """All images at any depth, their middle made 28 x 28 and grey: (N, 1, 28, 28) uint8."""
    endings = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings)
    pixels = np.empty((len(files), 1, SIZE, SIZE), np.uint8)
    for number, file in enumerate(files):
        with Image.open(file) as image:
            pixels[number, 0] = ImageOps.fit(image.convert("L"), (SIZE, SIZE))
    return torch.from_numpy(pixels)


def make_generator(width: int = 32) -> nn.Sequential:
    """(N, NOISE) to images (N, 1, 28, 28) in [-1, 1]."""
    return nn.Sequential(
        nn.Linear(NOISE, 4 * width * 49),
        nn.Unflatten(1, (4 * width, 7, 7)),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, width, 4, stride=2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator(width: int = 32) -> nn.Sequential:
    """Images to (N, 1), high for real ones."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(2 * width * 49, 1),
    )


class FrechetDistance:
    """The distance of the FID (Heusel et al., 2017) between two sets of images, of pixels shrunk to 7 x 7."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.real: list[Tensor] = []
        self.fake: list[Tensor] = []

    def update(self, real: Tensor, fake: Tensor) -> None:
        self.real.append(avg_pool2d(real, 4).flatten(1).double())
        self.fake.append(avg_pool2d(fake, 4).flatten(1).double())

    def compute(self) -> Tensor:
        real, fake = torch.cat(self.real), torch.cat(self.fake)
        covariances = real.T.cov(), fake.T.cov()
        # The trace of (A B)^(1/2) is the sum of the singular values of X'Y, where A = X X' and B = Y Y'.
        x, y = (
            vectors * values.clamp(min=0).sqrt()
            for values, vectors in map(torch.linalg.eigh, covariances)
        )
        both = torch.linalg.matrix_norm(x.T @ y, "nuc")
        shift = (real.mean(0) - fake.mean(0)).square().sum()
        return shift + sum(covariances).trace() - 2 * both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of images of your own")
    parser.add_argument("--images", type=int, default=7000, help="how many digits to draw")
    parser.add_argument("--width", type=int, default=32, help="channels of the networks")
    parser.add_argument("--duration", default="8ep")
    parser.add_argument("--checkpoint-every", default="1ep")
    parser.add_argument("--out", default="runs/gan")
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("the discriminator is trained by one process: start it without a launcher")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = read_images(arguments.data) if arguments.data else draw_digits(arguments.images)
    if len(images) < 7:
        parser.error(f"{arguments.data} holds {len(images)} images; give a folder of 7 or more")
    is_test = torch.arange(len(images)) % 7 == 6
    train = TensorDataset(images[~is_test])
    test = TensorDataset(images[is_test])
    torch.manual_seed(0)  # of the initial weights
    generator = make_generator(arguments.width).to(device)
    discriminator = make_discriminator(arguments.width).to(device)
    optimizer, discriminator_optimizer = (
        torch.optim.Adam(network.parameters(), lr=lr, betas=(0.5, 0.999), fused=True)
        for network, lr in ((generator, 1e-3), (discriminator, 4e-4))
    )
    discriminator_step = AmpStep(discriminator_optimizer)
    run = Run(
        arguments.out,
        generator,
        optimizer,
        train,
        duration=arguments.duration,
        checkpoint_every=arguments.checkpoint_every,
        batch_size=64,
        ema=0.995,
        state={"discriminator": discriminator, "discriminator_optimizer": discriminator_optimizer},
        metrics={"val_distance": FrechetDistance()},
        best="val_distance",
        config={
            "data": hashlib.sha256(images.numpy()).hexdigest()
        },  # other images are refused on a resume
    )
    for _ in run.epochs():
        for (images,) in run.batches():
            real = images / 127.5 - 1
            fake = generator(torch.randn(len(real), NOISE, device=device))

            loss_real = softplus(-discriminator(real)).mean()
            loss = loss_real + softplus(discriminator(fake.detach())).mean()
            discriminator_optimizer.zero_grad()
            discriminator_step.backward(loss)
            discriminator_step.step(
                watch=[loss]
            )  # changes nothing if that or a gradient is not finite

            generator_loss = softplus(-discriminator(fake)).mean()
            generator_loss = generator_loss.masked_fill(discriminator_step.halted.bool(), torch.nan)
            run.log(discriminator_loss=loss)
            run.step(generator_loss)
        for (images,) in run.evaluate(test):
            fake = generator(torch.randn(len(images), NOISE, device=device))
            run.log(val_distance=(images / 127.5 - 1, fake))

    averaged = load_file(Path(arguments.out, "model.safetensors"))
    generator.load_state_dict(averaged)
    noise = torch.randn(64, NOISE, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        images = generator.eval()(noise).squeeze(1).unflatten(0, (8, 8)).permute(0, 2, 1, 3)
    picture = Path(arguments.out, "samples.png")
    Image.fromarray((images.reshape(224, 224) * 127.5 + 127.5).byte().cpu().numpy()).save(picture)
    distance = run.result.metrics["val_distance"]
    print(f"distance of generated images: {distance:.2f}; 64 of them: {picture}")


if __name__ == "__main__":
    main()

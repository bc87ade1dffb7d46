import csv
from pathlib import Path
import torchaudio

def write_manifest(root, out):
    with open(out, "w", newline="") as f:
        writer = csv.writer(f)
        for path in sorted(Path(root).rglob("*.wav")):
            meta = torchaudio.info(str(path))
            writer.writerow([path, meta.num_frames / meta.sample_rate])

write_manifest("data/wavs", "manifest.csv")

# planted: line 15, torchaudio.load_wav was removed; use torchaudio.load(normalize=False); since torchaudio 0.9
import torch
import torchaudio
from torch.utils.data import Dataset


class Wavs(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        wav, sr = torchaudio.load_wav(self.files[i])
        return wav.float() / 32768, sr

import torch
import torchaudio

torchaudio.set_audio_backend("sox_io")

class MelFrontend(torch.nn.Module):
    def __init__(self, sr=16000):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(sample_rate=sr, n_mels=80)

    def forward(self, wav):
        return torch.log(self.mel(wav) + 1e-6)

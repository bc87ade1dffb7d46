import torch
import torchaudio

class Frontend(torch.nn.Module):
    def __init__(self, sr=16000):
        super().__init__()
        self.mel = torchaudio.transforms.MelSpectrogram(sample_rate=sr, n_fft=400, n_mels=64)
        self.db = torchaudio.transforms.AmplitudeToDB()
        self.mask = torchaudio.transforms.FrequencyMasking(freq_mask_param=8)

    def forward(self, wav):
        feat = self.db(self.mel(wav))
        return self.mask(feat) if self.training else feat

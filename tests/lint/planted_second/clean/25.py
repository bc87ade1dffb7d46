import torch

def spectrum(wav, n_fft=512):
    window = torch.hann_window(n_fft, device=wav.device)
    spec = torch.stft(wav, n_fft, window=window, return_complex=True)
    back = torch.istft(spec, n_fft, window=window, length=wav.shape[-1])
    freq = torch.fft.rfft(wav, dim=-1)
    return spec.abs(), back, freq

# planted: line 4, torchaudio.set_audio_backend was removed; since torchaudio 2.2 / 2.9
import torchaudio

torchaudio.set_audio_backend("soundfile")

resample = torchaudio.transforms.Resample(44100, 16000)
mel = torchaudio.transforms.MelSpectrogram(sample_rate=16000, n_mels=80)


def features(waveform):
    return mel(resample(waveform)).clamp(min=1e-5).log()

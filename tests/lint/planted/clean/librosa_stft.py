import librosa
import numpy as np

wave, rate = librosa.load("a.wav", sr=16000)
spec = librosa.stft(wave, n_fft=512)
print(np.abs(spec).mean(), rate)

"""Google Speech Commands (v0.01: 30 words, v0.02: 35) from its folders of wav, as 32x32 MFCC.

A network sees each coefficient standardised (zero mean, unit variance over the whole pool), because
the first one is some hundred times larger than the last. Stored as uint8 over -6 to 6 standard
deviations: the rounding (at most 0.024 of one) is far below the differences between takes of a
word, 0.05 % of values lie outside, and the cache takes a quarter of float32's room (108 MB for
v0.02).
"""

import re
import wave
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flrce.core.files import format_path, read_limited
from flrce.data.readers.files import track_progress
from flrce.data.sources import Source
from flrce.errors import BadInput

SAMPLE_RATE = 16_000  # one second, padded with silence or cut
MFCC_COEFFICIENTS = 32
MELS, WINDOW, HOP = 128, 2048, 512  # 1 + 16000 // 512 = 32 frames
MAX_DEVIATIONS = 6.0  # standard deviations either side
MAX_FILE_BYTES = 16 << 20
CLIPS_PER_BLOCK = 64  # clips transformed at once
FILE_NAME_PATTERN = re.compile(r"([0-9a-f]+)_nohash_[0-9]+\.wav")
ARCHIVE_FOLDERS = ("speech_commands_v0.02", "speech_commands_v0.01")
SEARCH_FOLDERS = ("", *ARCHIVE_FOLDERS, *(f"SpeechCommands/{name}" for name in ARCHIVE_FOLDERS))
FILE_REMEDY = "unpack speech_commands afresh"


def read_speech_commands(folder: Path, progress: bool = False) -> Source:
    """Every take of every word with its speaker; folders like _background_noise_ are left out."""
    takes = next((found for root in SEARCH_FOLDERS if (found := _list_takes(folder / root))), None)
    if not takes:
        raise BadInput(
            f"{format_path(folder)} has no folders of wav; unpack speech_commands_v0.02.tar.gz"
            " there"
        )
    paths = [path for word in takes.values() for path in word]
    speakers, group = np.unique([_parse_speaker(path) for path in paths], return_inverse=True)
    features = np.empty((len(paths), MFCC_COEFFICIENTS, 1 + SAMPLE_RATE // HOP), np.float32)
    for start in track_progress(range(0, len(paths), CLIPS_PER_BLOCK), "speech", progress):
        features[start : start + CLIPS_PER_BLOCK] = compute_mfcc(
            np.stack([read_clip(path) for path in paths[start : start + CLIPS_PER_BLOCK]])
        )
    y = np.repeat(np.arange(len(takes)), [len(word) for word in takes.values()])
    return build_speech_source(
        features[:, None], y, tuple(takes), group.astype(np.int64), tuple(map(str, speakers))
    )


def _list_takes(root: Path) -> dict[str, list[Path]]:
    entries = sorted(root.iterdir()) if root.is_dir() else []
    words = [entry for entry in entries if entry.is_dir() and entry.name[0] not in "_."]
    return {word.name: paths for word in words if (paths := sorted(word.glob("*.wav")))}


def build_speech_source(
    features: NDArray[np.float32],  # (N, 1, coefficients, frames)
    y: NDArray[np.int64],
    classes: tuple[str, ...],
    group: NDArray[np.int64],
    groups: tuple[str, ...],
) -> Source:
    """Standardises each coefficient over the pool and rounds it to 8 bits."""
    mean = features.mean(axis=(0, 1, 3), dtype=np.float64)[:, None]
    spread = np.maximum(features.std(axis=(0, 1, 3), dtype=np.float64)[:, None], 1e-6)
    x = np.empty(features.shape, np.uint8)
    for start in range(0, len(x), 4096):  # bounds the temporary float64
        z = (features[start : start + 4096] - mean) / spread
        x[start : start + 4096] = np.rint(
            (z.clip(-MAX_DEVIATIONS, MAX_DEVIATIONS) + MAX_DEVIATIONS)
            * (255 / (2 * MAX_DEVIATIONS))
        )
    scale = 2 * MAX_DEVIATIONS / 255
    return Source("speech", x, y, classes, group, groups, scale, shift=-MAX_DEVIATIONS)


def _parse_speaker(path: Path) -> str:
    if not (match := FILE_NAME_PATTERN.fullmatch(path.name)):
        raise BadInput(
            f"{format_path(path)} is not named SPEAKER_nohash_TAKE.wav; remove it or {FILE_REMEDY}"
        )
    return match[1]


def read_clip(path: Path) -> NDArray[np.int16]:
    """One second of 16-bit samples (16000,)."""
    try:
        with wave.open(BytesIO(read_limited(path, MAX_FILE_BYTES, FILE_REMEDY))) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            frames = file.getnframes()
            content = file.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as why:  # the last: a chunk of a false length
        raise BadInput(f"{format_path(path)} is no PCM wav; {FILE_REMEDY}") from why
    if form != (1, 2, SAMPLE_RATE):
        got = f"{form[0]} channels of {8 * form[1]} bits at {form[2]} Hz"
        raise BadInput(
            f"{format_path(path)} has {got} where 1 channel of 16 bits at {SAMPLE_RATE} Hz is"
            " expected; convert it"
        )
    if not frames or len(content) != 2 * frames:
        raise BadInput(
            f"{format_path(path)} claims {frames:,} samples but holds {len(content) // 2:,};"
            f" {FILE_REMEDY}"
        )
    samples = np.frombuffer(content, "<i2")[:SAMPLE_RATE].astype(np.int16)
    return np.pad(samples, (0, SAMPLE_RATE - len(samples)))


def compute_mfcc(clips: NDArray[np.int16]) -> NDArray[np.float32]:
    """Cepstra (B, 32, 32) of clips (B, 16000), coefficient by frame: librosa's mfcc, its defaults.

    Hann windows around every 512th sample, power on 128 mel bands, decibels down to 80 below the
    clip's loudest, orthonormal DCT. Tests hold it to librosa's values; scipy alone spares users
    librosa's half gigabyte.
    """
    from scipy.fft import dct, rfft
    from scipy.signal import get_window

    waves = np.pad(clips.astype(np.float32) / 32768, ((0, 0), (WINDOW // 2, WINDOW // 2)))
    # (B, 32, 2048)
    frames = np.lib.stride_tricks.sliding_window_view(waves, WINDOW, axis=1)[:, ::HOP]
    spectrum = rfft(frames * get_window("hann", WINDOW).astype(np.float32), axis=2)
    power = spectrum.real**2 + spectrum.imag**2  # (B, 32, 1025)
    decibels = 10 * np.log10(np.maximum(power @ mel_filters().T, 1e-10))
    decibels = np.maximum(decibels, decibels.max(axis=(1, 2), keepdims=True) - 80)
    cepstra: NDArray[np.float32] = dct(decibels, type=2, norm="ortho", axis=2)
    return cepstra[..., :MFCC_COEFFICIENTS].transpose(0, 2, 1)


@cache
def mel_filters() -> NDArray[np.float32]:
    """Triangles of equal area (128, 1025) on Slaney's mel scale: linear to 1 kHz, then log."""
    knee, steepness = 15.0, np.log(6.4) / 27  # mel at 1 kHz; log(Hz) per mel above
    top = knee + np.log(SAMPLE_RATE / 2 / 1000) / steepness
    mels = np.linspace(0, top, MELS + 2)
    hertz = np.where(mels < knee, mels * 200 / 3, 1000 * np.exp((mels - knee) * steepness))
    bins = np.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    low, middle, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    triangles: NDArray[np.float64] = np.minimum(
        (bins - low) / (middle - low), (high - bins) / (high - middle)
    ).clip(min=0)
    area: NDArray[np.float64] = (high - low) / 2
    return (triangles / area).astype(np.float32)

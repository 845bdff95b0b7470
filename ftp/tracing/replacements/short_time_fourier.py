"""Short-time Fourier transforms in ops whose rules let the signal be cut along its length."""

import torch
from torch import Tensor
from torch.nn import functional as F


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Overlapping frames are added and divided by the sum of their windows' squares, which is not
    checked for zeros.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    frames = input.shape[-1]
    if window is None:
        window = torch.ones(width, dtype=input.real.dtype, device=input.device)
    left = (n_fft - width) // 2
    window = F.pad(window, (left, n_fft - width - left))
    spectra = input.transpose(-1, -2)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        parts = torch.fft.ifft(spectra, dim=-1, norm=norm)
    else:
        parts = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, dim=-1, norm=norm)
    size = n_fft + hop * (frames - 1)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else size - start

    def overlapped(x: Tensor) -> Tensor:
        shape = [*x.shape[:-2], size]
        return torch.ops.aten.unfold_backward(x, shape, x.ndim - 2, n_fft, hop)[..., start:end]

    out = overlapped(parts * window) / overlapped((window * window).expand(frames, n_fft))
    return F.pad(out, (0, end - size)) if end > size else out


def stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """Frames by ``unfold``, whose rule lets the signal be cut; torch's own code uses strides, which
    a shard of the signal does not have.
    """
    spectra = input.is_complex() or (window is not None and window.is_complex())
    if (
        align_to_window is not None
        or (return_complex is None and not spectra)
        or input.ndim > 2
        or (onesided and spectra)
    ):
        lengths, form = (n_fft, hop_length, win_length), (normalized, onesided, return_complex)
        return torch.stft(input, *lengths, window, center, pad_mode, *form, align_to_window)
    hop = n_fft // 4 if hop_length is None else hop_length
    width = n_fft if win_length is None else win_length
    if center:
        signals = input.reshape(1, *(1,) * (2 - input.ndim), *input.shape)
        padded = F.pad(signals, [n_fft // 2] * 2, pad_mode)
        input = padded.reshape(*input.shape[:-1], padded.shape[-1])
    frames = input.unfold(-1, n_fft, hop)
    if window is not None or width < n_fft:
        left = (n_fft - width) // 2
        window = frames.new_ones(width) if window is None else window
        frames = frames * F.pad(window, (left, n_fft - width - left))
    norm = "ortho" if normalized else "backward"
    whole = spectra if onesided is None else not onesided
    made = (torch.fft.fft if whole else torch.fft.rfft)(frames, dim=-1, norm=norm).transpose(-1, -2)
    return made if return_complex is not False else torch.view_as_real(made)

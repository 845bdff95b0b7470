"""Rows that a mask selects: values and gradients of plain torch, on any mesh, for any mask."""

import itertools
import operator
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import singledispatch, singledispatchmethod
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from few_or_many import slow_unless
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import InputError, SpecError, TraceError

X = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[0, 5, -100], [2, -100, -100], [-100, -100, -100], [1, 1, 4]])


def _sum_of_logs(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    y = x @ w
    return y[y > 0].log().sum()  # the gradient of log at the others is not finite or not defined


def _mean(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    kept = (x @ w)[ids >= 0]
    return kept.square().mean() + (kept.sum(0) ** 2).sum() + kept.softmax(-1).amax(-1).mean()


def _losses(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    mask = ids >= 0
    logits, labels = F.layer_norm(x @ w, (6,))[mask], ids[mask]
    return F.cross_entropy(logits, labels, label_smoothing=0.1) + F.mse_loss(logits, x[mask])


def _told_by_class(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Outputs of which a loss takes the tensors, as of a detector's dict of losses."""
    kept = (x @ w)[ids >= 0]
    outputs = (kept, None, kept.square(), "aux", (kept * 2)[:, 0])
    total: Any = sum(out.square().sum() for out in outputs if isinstance(out, Tensor))
    # torch's class of a dtype reads the memory of what says it is a tensor.
    total += sum(not isinstance(out, torch.IntTensor) for out in outputs)
    for out in outputs:
        match out:
            case Tensor():
                total += out.cos().sum()
            case _:
                total += 1
    return total + sum(out.sin().sum() for out in outputs if torch.is_tensor(out))


ARRAYS = (np.ndarray, (Tensor,))


class _Kinds:
    TENSORS = Tensor | np.ndarray


@singledispatch
def _part(out: Any) -> Any:
    return 1


@_part.register(Tensor)
def _(out: Tensor) -> Tensor:
    return out.square().sum()


class _Parts:
    kinds = ARRAYS

    @singledispatchmethod
    def of(self, out: Any) -> Any:
        return 1

    @of.register(Tensor)
    def _(self, out: Tensor) -> Tensor:
        return out.cos().sum()


def _told_by_other_names(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """The class under another name, in a tuple or a union; by dispatch; as an attribute."""
    kept, tensor, parts = (x @ w)[ids >= 0], Tensor, _Parts()
    outputs = (kept, None, kept.square(), "aux", (kept * 2)[:, 0])
    total: Any = sum(out.square().sum() for out in outputs if isinstance(out, tensor))
    total += sum(out.sin().sum() for out in outputs if isinstance(out, ARRAYS))
    total += sum(out.exp().sum() for out in outputs if isinstance(out, _Kinds.TENSORS))
    total += sum(out.tanh().sum() for out in outputs if isinstance(out, parts.kinds))
    total += sum(not isinstance(out, torch.IntTensor | np.ndarray) for out in outputs)
    for out in outputs:
        match out:
            case tensor():
                total += out.cos().sum()
    total += sum(out.sigmoid().sum() for out in outputs if out.__class__ is Tensor)
    return total + sum(map(_part, outputs)) + sum(map(parts.of, outputs))


def _written_back(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    y, mask = x @ w, ids >= 0
    y[mask] = F.gelu(F.linear(y[mask], w)) * 2 + 1
    y[mask] *= x[mask][:, :1]
    return y.square().sum()


def _experts(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    tokens = x.flatten(0, 1)
    scores = (tokens @ w).softmax(-1)
    chosen, experts = scores.topk(2, -1)
    out = torch.zeros_like(tokens)
    for e in range(6):
        token, k = torch.where(experts == e)
        h = F.silu(tokens[token] @ w[:, e : e + 2]) @ w[e : e + 2]
        out.index_add_(0, token, h * chosen[token, k, None])
    return out.square().sum()


def _experts_of_mixtral(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """The loop of transformers 4, whose tokens are read behind a dim of size one."""
    tokens = x.flatten(0, 1)
    weights, experts = (tokens @ w).softmax(-1).topk(2, -1)
    out, mask = torch.zeros_like(tokens), F.one_hot(experts, num_classes=6).permute(2, 1, 0)
    for e in range(6):
        at, token = torch.where(mask[e])
        read = tokens[None, token]
        forms = (read.reshape(-1, 6), read.view(-1, 6), read.squeeze(0), read.flatten(0, 1))
        h = F.silu(forms[e % 4] @ w[:, e : e + 2]) @ w[e : e + 2] * weights[token, at, None]
        out.index_add_(0, token, h.to(read.dtype) + 0 * read[0])
    return out.square().sum()


def _logs_at_places(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    y = (x @ w).flatten()
    (at,) = torch.where(y > 0)
    return torch.relu(y)[at].log().sum()  # relu gives zeros elsewhere, of which log has none


def _embedded(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    (at,) = torch.nonzero(ids.flatten() > 0, as_tuple=True)
    rows = F.embedding(ids.flatten()[at], w) + x.flatten(0, 1)[at]
    return rows.tanh().sum() + torch.masked_select(x @ w, mask=x > 0).exp().sum()


def _by_dtype(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    kept = (x @ w)[ids >= 0]
    assert kept.is_floating_point() and torch.is_floating_point(kept) and not kept.is_complex()
    assert kept.element_size() == 8 and not ids[ids >= 0].is_floating_point()
    turned = torch.atan2(kept, x[ids >= 0].type_as(kept)).erfc() + torch.remainder(kept, 0.7)
    return torch.addcmul(turned, kept, kept, value=0.3).trunc().sum() + turned.square().mean()


def _mask_written_twice(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    y = (x @ w).flatten(0, 1)
    kept = y[ids.flatten() != -100] * x.flatten(0, 1)[ids.flatten() != -100]
    y[ids.flatten() != -100] = kept.tanh()
    loss = F.cross_entropy(y[ids.view(-1) != -100], ids.view(-1)[ids.view(-1) != -100])
    return loss + y.square().mean()


def _indices(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Positive samples of a detector, by ``nonzero`` in its forms."""
    y, flat, labels = (x @ w).flatten(0, 1), x.flatten(0, 1), ids.flatten()
    kept = y[labels >= 0].clamp_(min=-1).mul_(flat[labels >= 0])
    found = (labels >= 0).nonzero()
    at = found.squeeze(1)
    logits = torch.index_select(y, 0, at)
    loss = F.cross_entropy(logits, labels[at]) + logits.max() - logits.amin(0).sum()
    own = logits.log_softmax(-1).gather(1, labels[at][:, None])
    at = torch.nonzero(labels >= 0).squeeze()
    both = torch.cat([y[at], flat[found[:, 0]]], dim=1)
    places = torch.argwhere(ids >= 0)
    again = x[places[:, 0], places[:, 1]] * (x @ w)[torch.where(ids >= 0)]
    near = torch.stack([y[at], flat[at]], 2).flatten(1).norm(dim=1).clamp(min=0.1)
    best = F.normalize(y[at][:, [5, 0, 2]], dim=-1).topk(2, -1).values.sort(-1).values
    at = torch.where(labels >= 0)[0]
    halves = torch.zeros_like(y).index_add(0, at // 2, kept % 0.7)
    parts = (
        (kept * halves[at]).sum(),
        own.sum(),
        both.sin().sum(),
        again.square().mean(),
        near.mean(),
        best.std(-1).sum(),
    )
    return loss + sum(parts) + both.max(-1).values.sum() + both.max(2 * both).sum()


def _written_at_a_mask_beside_indices(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """One-hot targets of the rows that a detector matches."""
    tokens, mask = (x @ w).flatten(0, 1), ids.flatten() >= 0
    target = torch.zeros_like(tokens)
    target[mask, ids.flatten()[mask]] = 1.0
    return F.binary_cross_entropy_with_logits(tokens, target, reduction="sum")


def _written_at_indices(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """DeepSeek-V3's experts, as its own code writes them."""
    tokens = x.flatten(0, 1)
    chosen, experts = (tokens @ w).softmax(-1).topk(2, -1)
    out = torch.zeros_like(tokens)
    for e in range(6):
        token, k = torch.where(experts == e)
        h = F.relu((tokens[token] @ w[:, e : e + 2]).mul_(2), inplace=True)
        out[token] += (h @ w[e : e + 2]) * chosen[token, k, None]
    out[(ids.flatten() == 1).nonzero().squeeze(1)] = 0.3
    (at,) = torch.where(ids.flatten() == 4)
    out = out.index_copy(0, at, out[at] * 3).index_put((at,), out[at].sin(), accumulate=True)
    mixed, (row, column) = (x @ w)[..., 0], torch.where(ids > 0)
    mixed[row, column] = mixed[row, column] * x[row, column][:, 1]
    mixed[row, column] -= 1
    mixed[row - 4, column] = mixed[row, column].exp()
    return out.square().sum() + mixed.cos().sum()


def _hard_negatives(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """SSD's loss: of the boxes without an object, those of the largest loss, by two sorts."""
    scores, is_object = x @ w, ids > 0
    flat = scores.view(-1, 6)
    each = flat.logsumexp(1, keepdim=True) - flat.gather(1, ids.clamp(min=0).view(-1, 1))
    each = each.view(x.shape[0], -1)
    each[is_object] = 0
    _, order = each.sort(1, descending=True)
    _, rank = order.sort(1)
    count = is_object.long().sum(1, keepdim=True)
    is_hard = rank < torch.clamp(2 * count, max=2).expand_as(rank)
    of_object = is_object.unsqueeze(2).expand_as(scores)
    of_hard = is_hard.unsqueeze(2).expand_as(scores)
    picked = scores[(of_object + of_hard).gt(0)].view(-1, 6)
    due = ids.clamp(min=0)[(is_object + is_hard).gt(0)]
    boxes = F.smooth_l1_loss(
        scores[of_object].reshape(-1, 6), x[of_object].view(-1, 6), reduction="sum"
    )
    return (F.cross_entropy(picked, due, reduction="sum") + boxes) / count.sum()


def _boxes(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """YOLO's overlaps of boxes, and functions of each row beside them."""
    y, mask = x @ w, ids >= 0
    size = (torch.min(y[mask][..., 3:], x[mask][..., 3:]) - y[mask][..., :3]).clamp_(0).prod(-1)
    near = F.cosine_similarity(y[mask], x[mask], dim=-1)
    pairs = y[mask].unflatten(1, (2, 3))
    products = torch.bmm(pairs, x[mask].unflatten(1, (3, 2))).transpose(1, 2)
    first, *_ = F.glu(y[mask], -1).unbind(-1)
    kept = y[mask].masked_fill(x[mask] > 0, 0.5).cumprod(-1)
    return size.sum() + near.mean() + products.sin().sum() + first.sum() + kept.square().mean()


def _forms_of_rows(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Functions that move the features of each row."""
    y, near = (x @ w)[ids >= 0], x[ids >= 0].log_softmax(-1)
    moved = y.flip(-1) * y.roll(1, -1) + y[..., None].flip(1, 2)[..., 0]
    moved = moved + torch.roll(y, (2,), dims=(1,))
    moved = moved.index_select(1, torch.tensor([5, 4, 0, 1, 2, 3])) + torch.flip(y, (1,))
    pairs = y[:, :1].expand(-1, 6) * y.repeat(1, 2)[:, ::2] * (torch.ones_like(y) + 1)
    steps = y.diff(dim=1).square().sum(-1) + torch.diff(y, 2, -1).sum(-1)
    apart = F.kl_div(near, y.softmax(-1), reduction="batchmean") + F.kl_div(
        near, y.log_softmax(-1), reduction="sum", log_target=True
    )
    return (moved * pairs).mean() + steps.square().mean() + apart


def _of_no_rows(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Scatter within classes. No row is of class 3, for which torch computes nothing."""
    y, total = (x @ w).flatten(0, 1), w.new_zeros(())
    for c in (0, 3):
        mask = (ids.flatten() >= 0) if c == 0 else (ids.flatten() == c)
        kept = y[mask] - y[mask].mean(0)
        apart = (kept * (3 - c)).square().sum(-1).sqrt()
        total = total + (kept / mask.sum() @ w).square().sum() + apart.sum()
        total = total + ((kept * (4 * c)).acos() @ w).sum()
    return total


def _solved(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """MiDaS' alignment: scales of the images whose system can be solved."""
    y = (x @ w).sum(-1)
    rows, due = (y * y).sum(1), (y * x[..., 0]).sum(1)
    valid = (ids > 0).any(1).nonzero()
    scale = torch.zeros_like(rows)
    scale[valid] = due[valid] / rows[valid]
    return (scale[:, None] * y - x[..., 0]).square().sum()


def _found_by_rules(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Functions of each row that no table names."""
    mask = ids >= 0
    y, near = (x @ w)[mask], x[mask]
    pairs = torch.einsum("nd,nd->n", y, near) + torch.einsum("nd,de->ne", near, w).amax(1)
    at = y.abs().argmax(1, keepdim=True)
    taken = torch.take_along_dim(near, at, 1) + y.scatter(1, at, 2.0).cumsum(1)[:, 3:4]
    columns = [column.exp() for column in y[:, :2].T] + [*near.mT.sin()][:1]
    heads = y.view(-1, 2, 1, 3)
    mixed = F.scaled_dot_product_attention(heads, near.view(-1, 2, 1, 3), heads).flatten(1)
    images = F.conv1d(y[:, None], w[:2, None, :3], padding=1)
    images = F.interpolate(F.group_norm(images, 2), scale_factor=2.0).mean((1, 2))
    apart = torch.cdist(y, w[:3]).square().sum(1) + torch.outer(columns[0], w[0]).logsumexp(1)
    alike = F.cosine_embedding_loss(y, near, torch.where(ids[mask] > 1, 1, -1), margin=0.1)
    far = F.triplet_margin_loss(y, near, mixed) + F.margin_ranking_loss(
        columns[0], columns[1], torch.where(ids[mask] > 1, 1, -1)
    )
    each = pairs * columns[2] + taken[:, 0] + images + apart
    soft = (
        F.cross_entropy(y, near.softmax(1)) + F.cross_entropy(y, ids[mask], reduction="none").max()
    )
    soft = soft + F.binary_cross_entropy_with_logits(y, near.sigmoid(), pos_weight=x[0, 0].exp())
    soft = soft + F.poisson_nll_loss(y, near.exp()) + F.soft_margin_loss(y, near.sign())
    soft = soft + F.multilabel_soft_margin_loss(y, near.sigmoid()) + F.l1_loss(y, near)
    soft = soft + F.hinge_embedding_loss(y, near.sign()) + F.multi_margin_loss(y, ids[mask])
    return each.square().mean() + alike + far + mixed.sum() + soft + y.nanmean(1).cos().sum()


def _joined_rows(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Functions that join all rows, and attention over them."""
    y, scores = (x @ w)[ids >= 0], (x @ w)[..., 0][ids >= 0]
    weights = scores.softmax(0)
    spread = y.var(0).sum() + y.std() + scores.std(unbiased=False) + y.var((0, 1), correction=0)
    middle = scores.median() + torch.quantile(y, 0.3) + y.quantile(0.7, dim=0).sum()
    most = (
        y.logsumexp(0).sum() + y.norm() + torch.norm(y, dim=0).sum() + torch.linalg.norm(scores, 1)
    )
    most = (
        most + scores.prod() + (y > 0).any(0).sum() * (y < 9).all() + scores.log_softmax(0).mean()
    )
    return (weights[:, None] * y).sum(0).square().sum() + spread + middle + most


def _joined_selections(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Rows of several masks below each other, masks of selected rows, and rows of parts of rows."""
    y = x @ w
    positive, negative = y[ids > 0], y[ids < 0]
    both = torch.cat([positive, negative, y[0] * 2])
    due = torch.cat([ids[ids > 0].sign(), torch.zeros_like(ids[ids < 0]), ids[0].sign().abs()])
    loss = F.cross_entropy(both, due)
    again = positive[positive[:, 0] > 0]
    again[:, 1] = 0.5
    again[:, 2:4] = again[:, :2].clone() * again[:, 3:4].clone()
    again[again > 1] = 0.3
    column, count = again.argmax(1).clamp_(max=4), torch.zeros_like(again, dtype=torch.bool)
    count.scatter_(1, column[:, None], True)
    loss = loss + again.gather(1, column[:, None]).sum() + again[count].exp().sum()
    boxes = positive.reshape(-1, 3)
    wide = boxes[boxes[:, 0] > boxes[:, 1]].reshape(-1).square().sum()
    out = y.masked_scatter(
        (ids > 0)[..., None].expand_as(y), y[(ids > 0)[..., None].expand_as(y)].exp()
    )
    return loss + again.sin().sum() + wide + boxes.prod(1).mean() + out.square().mean()


def _found_by_rules_of_none(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    y, near = (x @ w)[ids >= 0], x[ids >= 0]
    apart = torch.cdist(y, w[:3]).sum() + F.cosine_similarity(y, near).sum() + y.norm(dim=1).sum()
    alike = F.cosine_embedding_loss(y, near, ids[ids >= 0].sign(), reduction="sum")
    return apart + alike + (y / near.sum(1, keepdim=True)).sum() + (x @ w).sum()


def _joined_of_none(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    y = (x @ w)[ids >= 0]
    return (y.softmax(0) * y).sum() + y.norm() + y.exp().logsumexp(0).exp().sum() + y.prod()


def _by_their_number(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Means as people write them, and roots and shares of the number of rows."""
    kept, few = (x @ w)[ids >= 0], (x @ w)[ids > 3]
    n, width = kept.shape
    total = kept.sum() / kept.shape[0] + kept.square().sum() / kept.numel() + few.sum(0).max() / n
    total = total + (kept / n**0.5).sin().sum() + (1 / n) * kept.sum() + kept.size(0) // 2
    share = (n - few.size(0)) / (2 + n) % 1
    out = kept.reshape(kept.shape[0], 2, 3).amax(-1).view(n, -1) * share
    alike = kept.shape == kept.sin().shape and width == 6 and isinstance(n, int)
    return out.square().sum() + total * alike + (-n) ** 3 / 1000


def _by_written_masks(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Masks that are made by writes, of rows and of selected rows, as masked autoencoders do."""
    hidden, before = torch.zeros(4, 3, dtype=torch.bool), ids[ids > 1].sum()
    hidden[torch.tensor([0, 2]), 1:] = True
    hidden[3] = ids[3] > 0
    y = (x @ w).clone()
    loss = F.mse_loss(y[hidden], x[hidden]) + y[~hidden].square().mean()
    kept, due = y[ids >= 0], x[ids >= 0]
    parts = torch.zeros_like(kept, dtype=torch.bool)
    parts[:, 2:4] = True
    loss = loss + F.mse_loss(kept[parts], due[parts]) + before
    copy = hidden.clone()
    copy[1] = False
    y[copy] = y[copy] * 2 - x[copy]
    return loss + y.square().mean()


def _by_keys(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """Masks behind other dims, and before slices and numbers."""
    y, rows, dims = x @ w, ids[:, 0] >= 0, ids[0] >= 0
    total = y[rows, 1:].square().sum() + y[rows, :, 2].mean() + y[rows, 0, None].exp().sum()
    behind = y[:, dims].tanh()  # (4, n, 6)
    total = total + behind.softmax(1).square().sum() + behind.sum(1).square().sum()
    total = total + (behind.amax(1, keepdim=True) * behind).sum() + behind.mean((0, 1)).sin().sum()
    total = total + y[..., dims, 1:3].square().sum() + y[..., dims, None, :].sin().sum()
    of_features = y.movedim(-1, 0).clone()
    total = total + of_features[..., ids >= 0].square().sum(-1).sin().sum()
    of_features[..., ids >= 0] = 2.0
    total = total + of_features.square().mean()
    y = y.clone()
    y[:, dims] = 2 * behind
    return total + y.square().mean()


def _products_over_rows(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    kept = (x @ w)[ids >= 0]
    gram = kept.T @ kept
    total = (w @ kept.mT).square().sum() + F.linear(kept.T, kept.sin().T).square().sum()
    total = total + torch.einsum("nd,ne->de", kept, kept.exp()).sum() + (kept.mT @ kept[:, 0]).sum()
    return total + torch.linalg.slogdet(gram + torch.eye(6))[1] + kept[:, 0].dot(kept[:, 1])


def _counts(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    kept = (x @ w)[ids >= 0]
    total = kept.sum() * torch.count_nonzero(kept > 0) + (kept * kept.count_nonzero(0)).sum()
    total = total + (kept + np.radians(30.0)).cos().sum() + (kept * np.float32(0.5)).sin().sum()
    some = torch.where(kept > 0, kept, torch.nan)
    return total + some.nanmean() + some.nansum(0).square().sum()


def _split_by_counts(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    tokens = x.flatten(0, 1) @ w
    expert = tokens[:, :3].argmax(-1)
    order = expert.argsort(stable=True)
    parts = tokens[order].split(torch.bincount(expert, minlength=3).tolist())
    out = torch.cat([(part @ (w + e)).tanh() for e, part in enumerate(parts)])
    few = torch.cat(parts[1:]).square().sum()  # some of them
    return (out * tokens[order]).square().sum() + few + torch.cat(parts[::-1]).cumprod(1).sum()


def _experts_of_deepseek(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    tokens = x.flatten(0, 1) @ w
    expert = tokens[:, :2].argmax(-1)
    counts = F.one_hot(expert, 3).sum(0).cpu().numpy()  # the last expert gets none
    order = expert.argsort()
    rows = tokens[order]
    outputs, start = [], 0
    for e, count in enumerate(counts):
        end = start + count
        outputs.append((rows[start:end] @ (w + e)).tanh())
        start = end
    back = torch.empty_like(rows)
    back[order] = torch.cat(outputs, dim=0)
    return (back * tokens).square().sum() + tokens[: (ids > 0).sum().item()].sum()


def _between_values(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    rows = x.flatten(0, 1) @ w
    n = (ids >= 0).sum().item()
    y = rows[:n].exp().sum() + rows[n:, 1:3].square().sum() + rows[-n:].mean()
    return y + rows[n:2].sum() + rows.T[:, 2:n].square().sum()


PROGRAMS = [
    _by_keys,
    _products_over_rows,
    _counts,
    _split_by_counts,
    _experts_of_deepseek,
    _between_values,
    _found_by_rules,
    _joined_rows,
    _joined_selections,
    _forms_of_rows,
    _of_no_rows,
    _boxes,
    _solved,
    _hard_negatives,
    _mask_written_twice,
    _indices,
    _written_at_indices,
    _written_at_a_mask_beside_indices,
    _sum_of_logs,
    _mean,
    _losses,
    _told_by_class,
    _told_by_other_names,
    _written_back,
    _experts,
    _experts_of_mixtral,
    _embedded,
    _logs_at_places,
    _by_dtype,
    _by_their_number,
    _by_written_masks,
]


MESHES = {"dp3": ((3,), ("dp",)), "dp2×tp2": ((2, 2), ("dp", "tp"))}


@pytest.mark.cases_by_default(4)
@pytest.mark.parametrize(
    ("program", "name"),
    slow_unless(
        lambda program, name: PROGRAMS.index(program) % 2 == list(MESHES).index(name),
        itertools.product(PROGRAMS, MESHES),
    ),
)
def test_values_and_gradients(program: Callable[..., Tensor], name: str):
    mesh = MESHES[name]
    w = W.clone().requires_grad_()
    expected = program(w, X, IDS)
    (gradient,) = torch.autograd.grad(expected, w)
    spec = P(None, "tp") if "tp" in mesh[1] else P()
    step = ftp.shard(program, ftp.simulated_mesh(*mesh), spec, batch_specs=P("dp"), certify=True)
    value, grad = step(W, X, IDS)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, gradient, rtol=1e-10, atol=1e-12)


def test_a_mask_that_is_changed_after_it_selected():
    def program(x: Tensor, ids: Tensor) -> Tensor:
        mask = ids >= 0
        kept = x[mask]
        mask[0] = ~mask[0]
        return kept.square().sum() + x[mask].mean()

    step = ftp.spmd(program, ftp.simulated_mesh((2,), ("dp",)), (P("dp"), P("dp")), P())
    torch.testing.assert_close(step(X, IDS), program(X, IDS), rtol=1e-12, atol=1e-12)


@pytest.mark.cases_by_default(4)
@pytest.mark.parametrize(
    "program",
    [
        _found_by_rules_of_none,
        _joined_of_none,
        _sum_of_logs,
        _written_back,
        _embedded,
        _logs_at_places,
        _written_at_indices,
    ],
)
def test_a_mask_that_selects_nothing(program: Callable[..., Tensor]):
    """Sums are zero and writes write nothing; gradients stay finite."""
    x, ids = -X.abs(), torch.full_like(IDS, -100)
    w = W.abs()
    own = w.clone().requires_grad_()
    expected = program(own, x, ids)
    (gradient,) = torch.autograd.grad(expected, own)
    value, grad = ftp.shard(program, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"))(
        w, x, ids
    )
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("program", [_sum_of_logs, _written_back, _embedded, _losses])
def test_a_mask_without_elements(program: Callable[..., Tensor]):
    own, x, ids = W.clone().requires_grad_(), X[:0], IDS[:0]
    expected = program(own, x, ids)
    (gradient,) = torch.autograd.grad(expected, own)
    mesh = ftp.simulated_mesh((2,), ("dp",))
    found = ftp.shard(program, mesh, P(), batch_specs=P("dp"))(W, x, ids)
    torch.testing.assert_close(found, (expected.detach(), gradient), equal_nan=True)


def _mask_changed_between(w, x, ids):
    ids = ids.clone()
    kept = (x @ w)[ids >= 0]
    ids[0, 0] = -1
    return (kept * x[ids >= 0]).sum()


def _one_mask_changed_between(w, x, ids):
    mask = ids >= 0
    kept = (x @ w)[mask]
    mask[0] = mask[0].flip(0)
    return (kept * x[mask]).sum()


def _copies_that_differ(w, x, ids):
    mask = ids >= 0
    copy, other = mask.clone(), mask.clone()
    other[0] = other[0].flip(0)
    return ((x @ w)[copy] * x[other]).sum()


def _view_of_a_changed_mask(w, x, ids):
    mask = ids >= 0
    flat, rows = mask.view(-1), x.flatten(0, 1)
    kept = (rows @ w)[flat]
    mask[0] = mask[0].flip(0)
    return (kept - rows[mask.view(-1)]).sum()


def _of_elements(w, x, ids):
    """Of an expanded mask that is changed after it selected."""
    mask = (ids > 0)[..., None].expand(4, 3, 6).clone()
    kept = (x @ w)[mask]
    mask[..., 0] = True
    return kept.reshape(-1, 6)


def _put(w, x, ids, value):
    out = x @ w
    out[torch.where(ids[:, 0] >= 0)[0]] = value
    return out.sum()


def _behind_one(w, x):
    y = x.flatten(0, 1) @ w
    return y[None, torch.where(y[:, 0] > 0)[0]]


REFUSED: dict[str, Callable[..., Tensor]] = {
    "the number of selected rows": lambda w, x, ids: w.sum() * len(range(x[ids > 0].size(0))),
    "a tensor of the shape": lambda w, x, ids: (
        x[m := ids >= 0] @ w * w.new_ones(x[m].size(0), 1)
    ).sum(),
    "torch.vmap over rows": lambda w, x, ids: torch.vmap(lambda r: (r @ w).sum())(
        x[ids >= 0]
    ).sum(),
    "a comparison of shapes": lambda w, x, ids: (x @ w).sum() * (x[ids > 0].shape == x.shape),
    "len()": lambda w, x, ids: (x @ w)[ids >= 0].sum() * len(x[ids >= 0]),
    "cumsum": lambda w, x, ids: (x @ w)[ids >= 0].cumsum(0).square().sum(),
    "tril": lambda w, x, ids: (x @ w)[ids >= 0].tril().sum(),
    "einsum": lambda w, x, ids: torch.einsum("nd,md->nm", (x @ w)[ids >= 0], x[ids >= 0]).sum(),
    "batch_norm": lambda w, x, ids: F.batch_norm(
        (x @ w)[ids >= 0], None, None, training=True
    ).sum(),
    "linalg_inv": lambda w, x, ids: torch.linalg.inv(w[ids[:, 0] >= 0][:, None, :1]).sum(),
    "zeros_like(rows)": lambda w, x, ids: torch.zeros((x @ w)[ids >= 0].size()).sum(),
    "__setitem__ of rows": lambda w, x, ids: operator.setitem((x @ w)[ids >= 0], 0, 1.0),
    "a write of another shape": lambda w, x, ids: (x @ w)[ids >= 0].t_().sum(),
    "reshape": lambda w, x, ids: (x @ w)[ids >= 0].reshape(3, -1).sum(),
    "different masks select": lambda w, x, ids: ((x @ w)[ids >= 0] * x[ids >= 1]).sum(),
    "mul of rows that different masks": _mask_changed_between,
    "mul of rows that different": _one_mask_changed_between,
    "mul of rows that different masks select": _copies_that_differ,
    "sub of rows that different masks": _view_of_a_changed_mask,
    "beside selected rows": lambda w, x, ids: ((x @ w)[ids >= 0] * x.flatten(0, 1)).sum(),
    "sort": lambda w, x, ids: (x @ w)[ids >= 0].sort(0).values.sum(),
    "cat": lambda w, x, ids: torch.cat([(x @ w)[ids >= 0], x]).sum(),
    "a loop over rows": lambda w, x, ids: sum(r.sum() for r in (x @ w)[ids >= 0]),
    "mse_loss": lambda w, x, ids: F.mse_loss((x @ w)[ids >= 0][:, :1], x[:, :, 0][ids >= 0]),
    "differ in their number of dims": lambda w, x, ids: (
        x[:, :, 0][m := ids >= 0] * (x @ w)[m]
    ).sum(),
    "matmul": lambda w, x, ids: ((x @ w)[m := ids >= 0] @ x[m].mT).sum(),
    "normalize": lambda w, x, ids: F.normalize((x @ w)[ids >= 0], dim=0).sum(),
    "a write of a tensor of shape (2, 3, 6)": lambda w, x, ids: _put(w, x, ids, x[:2] @ w),
    "another number of dims": lambda w, x, ids: _put(w, x, ids, x[..., 0][ids[:, 0] >= 0, 0]),
    "view, which": lambda w, x, ids: (x @ w)[x > 0].view(-1, 6).sum(),
    "reshape, which": lambda w, x, ids: _of_elements(w, x, ids).sum(),
    "add_": lambda w, x, ids: (x @ w).sum() + torch.where(ids > 0)[0].add_(1).sum(),
    "nonzero": lambda w, x, ids: (x @ w).sum() + len((ids > 0).nonzero()),
    "topk": lambda w, x, ids: (x @ w)[ids >= 0].topk(2, 0).values.sum(),
    "__getitem__": lambda w, x, ids: _behind_one(w, x)[0, 1].sum(),
    "squeeze": lambda w, x, ids: _behind_one(w, x).squeeze(1).sum(),
    "square": lambda w, x, ids: _behind_one(w, x).square().sum(),
    "mul": lambda w, x, ids: (_behind_one(w, x) * 2).sum(),
    "sin": lambda w, x, ids: torch.sin(_behind_one(w, x)).sum(),
    "flatten": lambda w, x, ids: _behind_one(w, x).flatten().sum(),
    "rmul": lambda w, x, ids: (2 * _behind_one(w, x)).sum(),
    "linalg_norm": lambda w, x, ids: torch.linalg.norm((x @ w)[ids >= 0], 2),
    "masked_scatter": lambda w, x, ids: (
        w.masked_scatter(m := ids.flatten()[:6] >= 0, (w @ w)[m]).square().sum()
    ),
    "gather": lambda w, x, ids: (x @ w)[ids >= 0].gather(0, ids[ids >= 0][:, None]).sum(),
}


def test_rows_behind_a_dim_of_one_are_no_result():
    step = ftp.spmd(_behind_one, ftp.simulated_mesh((2,), ("dp",)), (P(), P("dp")))
    with pytest.raises(TraceError, match="the result gives a shape that depends on values"):
        step(W, X)


@pytest.mark.parametrize("what", REFUSED)
def test_what_depends_on_the_number_of_rows_is_refused(what: str):
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.shard(REFUSED[what], mesh, P(), batch_specs=P("dp"), strict=True)
    with pytest.raises(TraceError, match="depends on values") as error:
        step(W, X, IDS)
    assert what in str(error.value) or what == "matmul"
    assert "test_selected.py" in str(error.value)


def _returned(x: Tensor, ids: Tensor) -> dict[str, object]:
    return {
        "rows": F.gelu(x[ids >= 0]),
        "none": x[ids > 99],
        "places": ((ids > 0).nonzero(), torch.where(ids == 1)),
        "elements": x.masked_select((ids > 0)[..., None]),
        "distinct": torch.unique(ids, return_inverse=True, return_counts=True),
        "runs": torch.unique_consecutive(ids.flatten() > 0, return_counts=True),
        "number": (ids > 0).sum(),
    }


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("mesh", [((3,), ("dp",)), ((2, 2), ("dp", "tp"))], ids=["dp3", "dp2×tp2"])
def test_returned_rows_are_cut_to_their_number(mesh: tuple[tuple, tuple]):
    specs = P("dp", None, "tp" if "tp" in mesh[1] else None), P("dp")
    step = ftp.spmd(_returned, ftp.simulated_mesh(*mesh), specs, certify=True)
    for ids in (IDS, IDS.flip(0), torch.full_like(IDS, -1)):  # one program, other numbers
        torch.testing.assert_close(step(X, ids), _returned(X, ids), rtol=0, atol=0)


def test_returned_rows_beside_a_loss_and_in_a_saved_program(tmp_path):
    def loss(w: Tensor, x: Tensor, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = x @ w
        return y.square().mean(), {"kept": y[ids >= 0], "names": ids.unique()}

    mesh = ftp.simulated_mesh((2,), ("dp",))
    (value, aux), _ = ftp.shard(loss, mesh, P(), batch_specs=P("dp"), has_aux=True)(W, X, IDS)
    expected, due = loss(W, X, IDS)
    torch.testing.assert_close((value, aux), (expected, due))
    lowered = ftp.lower(lambda x, ids: [x[ids >= 0]], mesh, P("dp"), X, IDS)
    lowered.save(tmp_path / "rows.ftp")
    for program in (lowered.compile(), ftp.load_program(tmp_path / "rows.ftp", mesh)):
        torch.testing.assert_close(program(X, IDS), [X[IDS >= 0]], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_their_number_decides_a_dtype_as_a_number_of_python_does(dtype, shape):
    def numbers(x: Tensor, mask: Tensor) -> list[Tensor]:
        n = mask[mask].shape[0]
        halves = n / 2, 1 / n, n**0.5, n - 0.5, n**-1
        found = [x * n, n + x, x / n, *(x * h for h in halves), n * 3, n // 2, 7 % n, (-n) ** 2]
        return [
            torch.as_tensor(f, dtype=torch.float64) if isinstance(f, float) else f for f in found
        ]

    x, mask = torch.full(shape, 3).to(dtype), torch.tensor([True, False, True, True, True, True])
    mesh = ftp.simulated_mesh((2,), ("dp",))
    found = ftp.spmd(numbers, mesh, (P(), P("dp")))(x, mask)
    for one, due in zip(found, numbers(x, mask), strict=True):
        if isinstance(due, Tensor):
            assert one.dtype == due.dtype
        torch.testing.assert_close(one, torch.as_tensor(due), rtol=0, atol=0)


def test_counts_of_values_that_no_op_bounds():
    """Torch gives more counts where a value is above the last; a trace assumes that none is."""

    def counts(x: Tensor, ids: Tensor) -> Tensor:
        return torch.bincount(ids.flatten(), weights=x[..., 0].flatten(), minlength=6)

    step = ftp.spmd(
        counts, ftp.simulated_mesh((2,), ("dp",)), (P("dp"), P("dp")), P(), check_inputs=True
    )
    ids = IDS.clamp(min=0)
    with pytest.warns(UserWarning, match=r"it is assumed that all are in \[0, 6\)"):
        lowered = step.lower(X, ids)
    assert len(lowered.assumptions) == 1
    with pytest.warns(UserWarning, match="it is assumed"):
        torch.testing.assert_close(step(X, ids), counts(X, ids))
    with pytest.raises(InputError, match=r"all values are in \[0, 6\)"):
        step(X, ids + 1)


def test_a_spec_of_returned_rows_is_an_error():
    step = ftp.spmd(lambda x, ids: x[ids > 0], ftp.simulated_mesh(2, "dp"), P("dp"), P("dp"))
    with pytest.raises(SpecError, match="is known after the run"):
        step(X, IDS)


def test_a_table_of_distinct_names():
    """``unique`` with the place of each element: rows at plain indices."""

    def of_rows(w: Tensor, ids: Tensor) -> Tensor:
        names, place = torch.unique(ids.clamp(min=0), return_inverse=True)
        rows = torch.tanh(w[names])
        return rows[place].square().sum() + rows.sin().sum() + rows[torch.tensor([-1, 0])].sum()

    for mesh, spec in (
        (ftp.simulated_mesh((3,), ("tp",)), P("tp")),
        (ftp.simulated_mesh(2, "tp"), P()),
    ):
        w = W.clone().requires_grad_()
        expected = of_rows(w, IDS)
        (gradient,) = torch.autograd.grad(expected, w)
        value, grad = ftp.shard(of_rows, mesh, spec, certify=True)(W, IDS)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(grad, gradient, rtol=1e-11, atol=1e-12)


def test_a_tensor_of_as_many_rows_as_are_selected():
    def loss(w: Tensor, x: Tensor, ids: Tensor, due: Tensor) -> Tensor:
        return ((x @ w)[ids >= 0] - due).square().sum()

    due = X.flatten(0, 1)[: int((IDS >= 0).sum())]
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(loss, mesh, P(None, "tp"), check_inputs=True)
    with pytest.warns(UserWarning, match="assumes that the mask selects 6 rows"):
        value, grad = step(W, X, IDS, due)
    w = W.clone().requires_grad_()
    expected = loss(w, X, IDS, due)
    (gradient,) = torch.autograd.grad(expected, w)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(grad, gradient, rtol=1e-11, atol=1e-12)
    with pytest.raises(InputError, match="selects 6 rows"):
        step(W, X, IDS.clamp(min=0), due)


def test_as_many_values_as_a_mask_selects_are_written():
    def loss(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        y, z = x * 1, x.index_put((ids >= 0,), w * 2)
        y[ids >= 0] = w
        return (y * x).sum() + z.square().sum()

    w = torch.randn(int((IDS >= 0).sum()), X.shape[-1], dtype=X.dtype)
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"), check_inputs=True)
    assert len(step.lower(w, X, IDS).assumptions) == 2
    grad, value = torch.func.grad_and_value(loss)(w, X, IDS)
    torch.testing.assert_close(step(w, X, IDS), (value, grad), rtol=1e-11, atol=1e-12)
    for ids in (IDS.clamp(min=0), torch.where(IDS == 0, -1, IDS).clamp(max=0)):
        with pytest.raises(InputError, match="selects 6 elements"):
            step(w, X, ids)


def test_rows_returned_beside_a_gradient_in_the_function():
    def slopes(w: Tensor, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        def inner(w: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            y = x @ w
            return y.square().sum(), (y[y[..., 0] > 0], y[ids >= 0])

        grad, (above, kept) = torch.func.grad(inner, has_aux=True)(w)
        return grad, above, kept.mean()

    step = ftp.spmd(slopes, ftp.simulated_mesh((2,), ("dp",)), (P(), P("dp"), P("dp")))
    torch.testing.assert_close(step(W, X, IDS), slopes(W, X, IDS), rtol=1e-11, atol=1e-12)


def test_a_selected_nan_is_the_median_and_the_quantile():
    x = torch.tensor([[1.0, 2], [torch.nan, 4], [3, 5], [torch.nan, 6]], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])

    def fn(x, mask):
        rows, q = x[mask], torch.tensor([0.5, 0.1], dtype=torch.float64)
        without = x[mask & (x[:, 0] == x[:, 0])]
        kept = rows.quantile(0.5, 0, keepdim=True)
        return rows.median(), rows.quantile(0.3), rows.quantile(q, dim=0), kept, without.median()

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P("tp")), P())
    torch.testing.assert_close(step(x, mask), fn(x, mask), equal_nan=True)


REDUCED: list[Callable[[Any], Tensor]] = [
    lambda rows: rows.logsumexp(0),
    lambda rows: rows.logsumexp(axis=1).sum(),
    lambda rows: torch.softmax(rows, 0, dtype=torch.float64).square().sum(),
    lambda rows: F.softmax(rows, 0, dtype=torch.float64).square().sum(),
    lambda rows: rows.prod(axis=1).sum(),
    lambda rows: rows.sum(axis=0, keepdims=True),
    lambda rows: (
        rows.double().std(axis=1).sum() + rows.amax(axis=1).sum() + rows.max(axis=1)[0].sum()
    ),
    lambda rows: torch.sum(input=rows, dim=0),
]


def test_reductions_of_integer_rows_and_by_numpys_names():
    def fn(x: Tensor) -> list[Tensor]:
        return [
            *(reduced(x[x[:, 0] > 0]) for reduced in REDUCED),
            (x > 2)[x[:, 0] > 0].logsumexp(0),
        ]

    x = torch.tensor([[1, 5, -2], [-1, 0, 3], [0, 7, 1], [4, -3, 2], [2, 2, 6]])
    found = ftp.spmd(fn, ftp.simulated_mesh(2, "dp"), P("dp"), P())(x)
    for ours, theirs in zip(found, fn(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["amax", "amin", "max", "min"])
def test_an_extremum_of_no_rows_is_an_error_of_checked_inputs(name: str):
    """It is an error of torch's."""
    step = ftp.spmd(
        lambda x, mask: getattr(x[mask], name)(),
        ftp.simulated_mesh(2, "dp"),
        (P("dp"), P("dp")),
        P(),
        check_inputs=True,
    )
    x, mask = torch.arange(3.0), torch.tensor([True, False, True])
    torch.testing.assert_close(step(x, mask), getattr(x[mask], name)())
    with pytest.raises(InputError, match=f"the mask selects a row: {name}\\(\\) of none"):
        step(x, mask & ~mask)


@pytest.mark.parametrize("k", [torch.tensor(2**64 - 1, dtype=torch.uint64), torch.tensor(2 + 3j)])
def test_numbers_of_uint64_and_complex_numbers_are_refused(k: Tensor):
    """The program counts in int64 and float64."""
    step = ftp.spmd(lambda x, k: x * k.item(), ftp.simulated_mesh(2, "dp"), P(), P())
    with pytest.raises(TraceError, match="needs a tensor's value"):
        step(torch.ones(2), k)


def ctc(w: Tensor, x: Tensor, labels: Tensor, steps: Tensor) -> Tensor:
    """As transformers' speech models: the labels of all examples, one after the other."""
    mask = labels >= 0
    scores = F.log_softmax(x @ w, -1).transpose(0, 1)
    return F.ctc_loss(scores, labels.masked_select(mask), steps, mask.sum(-1))


def test_ctc_of_selected_labels_has_one_plan_for_all_numbers_of_them():
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.shard(ctc, mesh, P(), batch_specs=P("dp"))
    for seed, batch in enumerate((3, 3, 4, 5)):
        torch.manual_seed(seed)
        w, x = torch.randn(4, 7).double(), torch.randn(batch, 11, 4).double()
        labels = torch.randint(1, 7, (batch, 5)).masked_fill(torch.rand(batch, 5) < 0.4, -100)
        given = w, x, labels, torch.randint(9, 12, (batch,))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ftp.errors.ReadWarning)
            value, grads = step(*given)
        expected = torch.func.grad_and_value(ctc)(*given)
        torch.testing.assert_close((grads, value), expected)
    assert step.shapes.one_by_one == ()


def test_ctc_of_other_lengths_reads_the_number_of_labels():
    def loss(w, x, labels, steps, lengths):
        scores = F.log_softmax(x @ w, -1).transpose(0, 1)
        return F.ctc_loss(scores, labels[labels >= 0], steps, lengths)

    labels = torch.tensor([[3, -1, 2], [1, 4, -1]])  # two, then two; or one, then three
    w, x, steps = torch.randn(4, 7), torch.randn(2, 9, 4), torch.tensor([9, 8])
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"))
    for lengths in ([2, 2], [1, 3]):
        given = w, x, labels, steps, torch.tensor(lengths)
        with pytest.warns(ftp.errors.ReadWarning) if lengths[0] == 2 else nullcontext():
            value, _ = step(*given)
        torch.testing.assert_close(value, loss(*given))


def _beside_slices(w: Tensor, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """As Qwen3-VL adds the features of images to the tokens that stand for them."""
    y = x @ w
    y[mask, :] = y[mask, :].clone() + rows @ w
    return y.square().mean()


def _some_columns(w: Tensor, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    y = x @ w
    y[mask, 0], y[mask, 2:4] = (rows @ w)[:, 0], (rows @ w)[:, :1]
    y[mask, ...] *= rows.sum() + w[0]
    return y.square().mean()


def _behind_slices(w: Tensor, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    y = (x @ w).movedim(-1, 0).clone()
    y[:, mask] = (rows @ w).T
    y[..., mask] += w[:, :1]
    return y.square().mean()


def _behind_parts(w: Tensor, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    y = (x @ w).movedim(-1, 0).clone()
    y[1:3, mask], y[None, ::2, mask] = (rows @ w).T[:2], w[0, 0]
    y[-1, mask] = rows[:, 0] * w.sum()
    y[3:, mask] *= w[:3, :1]
    return y.square().mean() + (w[:2, :1] * y[4:, mask]).exp().sum() + y[0, mask].mean()


def _beside_indices(w: Tensor, x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    y, first = (x @ w), torch.tensor([True, False])
    y[mask[:, 0], first] = rows[0] @ w
    y[mask, torch.arange(len(rows)).flip(0)] *= w[0, 0]
    y[torch.tensor([3, 0]), first] += w[0]
    return y.square().mean() + y[1:, torch.tensor([1]), mask[0].nonzero()[:1, 0]].sum()


@pytest.mark.filterwarnings(
    "ignore:(.|\\n)*ftp assumes that the mask selects:UserWarning",
    "ignore:(.|\\n)*as a Python number:ftp.errors.ReadWarning",
)
@pytest.mark.parametrize(
    "loss", [_beside_slices, _some_columns, _behind_slices, _behind_parts, _beside_indices]
)
def test_values_with_gradients_are_written_at_a_mask_beside_slices(loss: Callable[..., Tensor]):
    mask = IDS[:, :2] >= 0
    given = W, X[:, :2], mask, torch.randn(int(mask.sum()), 6, dtype=torch.float64)
    mesh = ftp.simulated_mesh((2,), ("dp",))
    step = ftp.shard(loss, mesh, P(), batch_specs=(P("dp"), P("dp"), P()))
    torch.testing.assert_close(step(*given)[::-1], torch.func.grad_and_value(loss)(*given))

"""Programs whose shapes depend on values, as their authors' code writes them: counts, lengths and
classes that are read, rows that are sorted, boxes that are left out; and overlapping chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from public_programs import Program
from public_recent import drawn
from public_signals import indices
from real_models import randn
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ftp import P


def uniform(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def pooled_graphs() -> Program:
    """GraphSAGE with degrees; the mean of each graph of a batch, whose number is read."""

    def loss(params: Any, x: Tensor, edges: Tensor, graph: Tensor, labels: Tensor) -> Tensor:
        source, to = edges
        degree = torch.zeros(x.size(0), dtype=x.dtype)
        degree = degree.scatter_add_(0, to, torch.ones(to.size(0), dtype=x.dtype))
        for i in range(2):
            near = x @ params[f"near{i}"]
            near = torch.zeros_like(near).index_add_(0, to, near[source])
            x = F.relu(x @ params[f"own{i}"] + near / degree.clamp(min=1).unsqueeze(-1))
            x = F.normalize(x, dim=-1)
        size = int(graph.max().item() + 1)
        pooled = torch.zeros(size, x.size(1), dtype=x.dtype)
        pooled = pooled.scatter_add_(0, graph.view(-1, 1).expand_as(x), x)
        count = F.one_hot(graph).sum(0)
        return F.cross_entropy((pooled / count.unsqueeze(1)) @ params["o"], labels)

    params = drawn({"near0": (5, 6), "own0": (5, 6), "near1": (6, 6), "own1": (6, 6), "o": (6, 3)})
    edges = torch.stack([indices(9, 14), (indices(9, 14) * 5 + 2) % 9])
    graph = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    return Program(loss, params, (randn(9, 5), edges, graph, torch.tensor([0, 2, 1])), {}, P())


def speculative() -> Program:
    """Speculative decoding: the drafter learns from the tokens that are accepted."""

    def loss(params: Any, context: Tensor, draft: Tensor, drawn: Tensor) -> Tensor:
        h = F.embedding(draft, params["embed"]).cumsum(0)
        q, p = (h @ params["small"]).softmax(-1), ((h + context) @ params["large"]).softmax(-1)
        own, due = q.gather(1, draft[:, None])[:, 0], p.gather(1, draft[:, None])[:, 0]
        accepted = drawn < (due / own).clamp(max=1.0).detach()
        n = int(accepted.long().cumprod(0).sum())
        at = min(n, len(draft) - 1)
        rest = (p[at] - q[at]).clamp(min=0)
        rest = rest / rest.sum().clamp(min=1e-6)
        return rest.square().sum() - own[:n].log().sum() / max(n, 1)

    params = drawn({"embed": (9, 6), "small": (6, 9), "large": (6, 9)})
    return Program(loss, params, (randn(5, 6), indices(9, 5), uniform(5) * 0.6), {}, P())


def ragged_attention() -> Program:
    """Sequences in one tensor: split by lengths, padded, attended to with a mask."""

    def loss(params: Any, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        padded = pad_sequence(list(torch.split(x, lengths.tolist())), batch_first=True)
        mask = torch.arange(padded.size(1))[None, :] >= lengths[:, None]
        q, k, v = (padded @ params[n] for n in "qkv")
        scores = (q @ k.transpose(1, 2)).masked_fill(mask[:, None], float("-inf"))
        h = scores.softmax(-1) @ v
        pooled = h.masked_fill(mask[..., None], 0).sum(1) / lengths[:, None]
        return F.cross_entropy(pooled @ params["o"], labels)

    params = drawn({"q": (5, 6), "k": (5, 6), "v": (5, 6), "o": (6, 3)})
    batch = (randn(10, 5), torch.tensor([3, 5, 2]), torch.tensor([0, 1, 2]))
    return Program(loss, params, batch, {}, P())


def bags() -> Program:
    """Multiple instances: gated attention within each bag, in a loop over the bags."""

    def loss(params: Any, x: Tensor, bag: Tensor, labels: Tensor) -> Tensor:
        gated = torch.tanh(x @ params["v"]) * torch.sigmoid(x @ params["u"])
        scores, pooled = gated @ params["w"], []
        for b in range(int(bag.max().item()) + 1):
            inside = bag == b
            pooled.append((torch.softmax(scores[inside], 0) * x[inside]).sum(0))
        logits = (torch.stack(pooled) @ params["o"]).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels)

    params = drawn({"v": (5, 6), "u": (5, 6), "w": (6, 1), "o": (5, 1)})
    labels = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    batch = (randn(9, 5), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2]), labels)
    return Program(loss, params, batch, {}, P())


def lovasz() -> Program:
    """Lovász-Softmax: sorted errors of the pixels that are labelled."""

    def slopes(is_class: Tensor) -> Tensor:
        total = is_class.sum()
        jaccard = 1.0 - (total - is_class.cumsum(0)) / (total + (1 - is_class).cumsum(0))
        if len(is_class) > 1:
            jaccard[1:] = jaccard[1:] - jaccard[:-1]
        return jaccard

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        chances = F.softmax(F.conv2d(x, params["w"]), 1).permute(0, 2, 3, 1).reshape(-1, 3)
        valid = labels.view(-1) != 255
        chances, labels = chances[valid.nonzero().squeeze()], labels.view(-1)[valid]
        losses = []
        for c in range(3):
            is_class = (labels == c).to(x.dtype)
            if is_class.sum() == 0:
                continue
            errors, order = torch.sort((is_class - chances[:, c]).abs(), 0, descending=True)
            losses.append(torch.dot(errors, slopes(is_class[order])))
        return sum(losses) / len(losses)  # type: ignore[return-value]

    labels = indices(3, 2, 3, 3)
    labels[0, 0] = 255
    return Program(loss, {"w": randn(3, 2, 2, 2)}, (randn(2, 2, 4, 4), labels), {}, P())


def hard_pixels() -> Program:
    """Online hard example mining: the pixels that are predicted worst."""

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        scores = F.conv2d(x, params["w"])
        losses = F.cross_entropy(scores, labels, ignore_index=-1, reduction="none").view(-1)
        mask, due = labels.view(-1) != -1, labels.clone()
        due[due == -1] = 0
        chances = scores.softmax(1).gather(1, due.unsqueeze(1)).contiguous().view(-1)
        chances, order = chances[mask].contiguous().sort()
        threshold = max(chances[min(5, chances.numel() - 1)], 0.7)
        return losses[mask][order][chances < threshold].mean()

    labels = indices(3, 2, 3, 3)
    labels[0, 0] = -1
    return Program(loss, {"w": randn(3, 2, 2, 2)}, (randn(2, 2, 4, 4), labels), {}, P())


def edge_softmax() -> Program:
    """GATv2 by functions of an edge list: self loops, a softmax over each node's edges."""

    def softmax(x: Tensor, index: Tensor, count: int | None = None) -> Tensor:
        n = int(index.max()) + 1 if count is None else count
        index = index[:, None].expand_as(x)
        zeros = torch.zeros(n, x.size(1), dtype=x.dtype)
        largest = zeros.scatter_reduce(0, index, x.detach(), "amax", include_self=False)
        out = (x - largest.gather(0, index)).exp()
        return out / (zeros.scatter_add(0, index, out) + 1e-16).gather(0, index)

    def loss(params: Any, x: Tensor, edges: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        n = x.size(0)
        kept = edges[0] != edges[1]
        loops = torch.arange(n).unsqueeze(0).repeat(2, 1)
        source, to = torch.cat([edges[:, kept], loops], dim=1)
        left, right = (x @ params["l"]).view(-1, 2, 4), (x @ params["r"]).view(-1, 2, 4)
        e = F.leaky_relu(left[source] + right[to], 0.2)
        weights = softmax((e * params["attention"]).sum(-1), to)
        out = torch.zeros(n, 2, 4, dtype=x.dtype)
        out.index_add_(0, to, left[source] * weights.unsqueeze(-1))
        logits = F.elu(out.view(-1, 8)) @ params["o"]
        return F.cross_entropy(logits[mask], labels[mask])

    params = drawn({"l": (5, 8), "r": (5, 8), "attention": (1, 2, 4), "o": (8, 3)})
    edges = torch.stack([indices(7, 12), (indices(7, 12) * 3 + 1) % 7])
    batch = (randn(7, 5), edges, indices(3, 7), torch.arange(7) % 3 != 0)
    return Program(loss, params, batch, {}, P())


def sorted_experts() -> Program:
    """DeepSeek's inference: tokens in the order of their experts, a slice for each expert."""

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        weights, chosen = (x @ params["gate"]).softmax(-1).topk(2, -1)
        counts = chosen.new_zeros((chosen.shape[0], 4)).scatter_(1, chosen, 1).sum(0)
        order = chosen.view(-1).argsort()
        tokens, parts, start = x[order // 2], [], 0
        for e, count in enumerate(counts.cpu().numpy()):
            if count == 0:
                continue
            h = F.silu(tokens[start : start + count] @ params["up"][e])
            parts.append(h @ params["down"][e])
            start += count
        out = torch.cat(parts, dim=0)
        back = torch.empty_like(out)
        back[order] = out
        mixed = back.view(*chosen.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)
        return F.mse_loss(mixed, y)

    params = drawn({"gate": (6, 4), "up": (4, 6, 8), "down": (4, 8, 6)})
    return Program(loss, params, (randn(8, 6), randn(8, 6, seed=3)))


def prototypes() -> Program:
    """Prototypical networks: classes, support and queries from the labels of an episode."""

    def loss(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(x @ params["a"]) @ params["b"]
        classes = torch.unique(labels)
        n = len(classes)
        queries = int(labels.eq(classes[0].item()).sum().item()) - 2
        at = [labels.eq(c).nonzero().squeeze(1) for c in classes]
        means = torch.stack([h[i[:2]].mean(0) for i in at])
        asked = h[torch.stack([i[2:] for i in at]).view(-1)]
        far = (asked.unsqueeze(1) - means.unsqueeze(0)).pow(2).sum(2)
        chances = F.log_softmax(-far, dim=1).view(n, queries, -1)
        due = torch.arange(n).view(n, 1, 1).expand(n, queries, 1)
        return -chances.gather(2, due).squeeze().view(-1).mean()

    params = drawn({"a": (6, 8), "b": (8, 4)})
    return Program(loss, params, (randn(12, 6), torch.tensor([0, 1, 2] * 4)), {}, P())


def suppressed_boxes() -> Program:
    """Proposals through greedy suppression of overlaps; a loss of those that are kept."""

    def overlaps(a: Tensor) -> Tensor:
        sides = torch.min(a[:, None, 2:], a[:, 2:]) - torch.max(a[:, None, :2], a[:, :2])
        shared, area = sides.clamp(min=0).prod(-1), (a[:, 2:] - a[:, :2]).prod(-1)
        return shared / (area[:, None] + area - shared)

    def loss(params: Any, x: Tensor, boxes: Tensor) -> Tensor:
        scores = (x @ params["score"]).squeeze(-1)
        order = scores.argsort(descending=True)
        overlap = overlaps(boxes[order])
        keep = torch.ones(len(order), dtype=torch.bool)
        for i in range(len(order)):
            if not keep[i]:
                continue
            keep[i + 1 :] &= overlap[i, i + 1 :] <= 0.3
        kept = order[keep]
        near = F.mse_loss(x[kept] @ params["head"], boxes[kept])
        return near + F.softplus(-scores[kept]).mean()

    corner = uniform(6, 2)
    boxes = torch.cat([corner, corner + 0.3 + uniform(6, 2, seed=5)], 1)
    return Program(loss, drawn({"score": (6, 1), "head": (6, 4)}), (randn(6, 6), boxes), {}, P())


def overlapping_chunks() -> Program:
    """Longformer: scores of overlapping chunks by as_strided, on the diagonals of a band."""

    def chunks(x: Tensor) -> Tensor:
        x = x.view(x.size(0), x.size(1) // 4, 4, x.size(2))
        size, stride = list(x.size()), list(x.stride())
        size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
        return x.as_strided(size=size, stride=stride)

    def loss(params: Any, x: Tensor) -> Tensor:
        q, k, v = (x @ params[n] for n in "qkv")
        scores = torch.einsum("bcxd,bcyd->bcxy", chunks(q), chunks(k))
        scores = F.pad(scores, (0, 0, 0, 1)).view(len(x), 3, 4, 5)
        band = scores.new_zeros((len(x), 4, 2, 5))
        band[:, :-1, :, 2:] = scores[:, :, :2, :3]
        band[:, -1, :, 2:] = scores[:, -1, 2:, :3]
        band[:, 1:, :, :2] = scores[:, :, -3:-1, 3:]
        band[:, 0, 1:2, 1:2] = scores[:, 0, :1, -1:]
        band = band.view(len(x), 8, 5)
        outside = band.new_ones(2, 3).tril().flip(0).bool()
        band[:, :2, :3] = band[:, :2, :3].masked_fill(outside, -1e9)
        band[:, -2:, -3:] = band[:, -2:, -3:].masked_fill(outside.flip(0, 1), -1e9)
        windows = F.pad(v, (0, 0, 2, 2), value=-1).unfold(1, 5, 1)
        out = torch.einsum("blk,bldk->bld", band.softmax(-1), windows)
        return (out @ params["o"]).square().mean()

    params = drawn({"q": (5, 6), "k": (5, 6), "v": (5, 6), "o": (6, 4)})
    return Program(loss, params, (randn(4, 8, 5),))


VALUES: dict[str, Callable[[], Program]] = {
    "GraphSAGE, graphs pooled": pooled_graphs,
    "speculative decoding": speculative,
    "ragged attention": ragged_attention,
    "multiple instances": bags,
    "Lovász-Softmax": lovasz,
    "hard example mining": hard_pixels,
    "GATv2": edge_softmax,
    "DeepSeek's experts, sorted": sorted_experts,
    "prototypical networks": prototypes,
    "suppressed boxes": suppressed_boxes,
    "Longformer": overlapping_chunks,
}

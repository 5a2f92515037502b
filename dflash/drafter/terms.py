"""The terms that a slot's loss is mixed from, and their gradient with respect to its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """Weights, at least 0, of what a slot adds: ce * CE + kl * KL + tv * TV + cap * CAP, in nats but for TV.

    With s the drafter's distribution and t the target's: CE = -log s(label). KL = sum t' log(t' / s'), forward, where
    t' and s' are t and s at `kl_temperature`; there is no further factor of its square. TV = 1 - sum min(s, t).
    CAP = the entropy of s where its argmax is the label, else 0; which slots these are is held constant.
    Source: design section 3; CAP: arXiv 2512.15745.
    """

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    cap: float = 0.0
    kl_temperature: float = 1.0

    @property
    def needs_teacher(self) -> bool:
        return self.kl > 0 or self.tv > 0

    @property
    def is_mixture(self) -> bool:
        """Whether there is anything but cross entropy."""
        return self.needs_teacher or self.cap > 0

    @property
    def value_names(self) -> tuple[str, ...]:
        """What is computed of a slot: CE always, the others where they are on, with CAP every slot's entropy."""
        on = {"ce": True, "kl": self.kl > 0, "tv": self.tv > 0, "cap": self.cap > 0, "entropy": self.cap > 0}
        return tuple(name for name, is_on in on.items() if is_on)


@dataclass(frozen=True, slots=True)
class RowTerms:
    """Of R rows of logits: each term's values [R], the predicted tokens and the labels i64 [R]."""

    values: dict[str, Tensor]
    predicted_R: Tensor
    labels_R: Tensor


def row_terms(
    terms: Terms,
    logits_RV: Tensor,
    teacher_RV: Tensor | None,
    labels_R: Tensor | None,
    gradient_RV: Tensor | None,
    ce_gradient_RV: Tensor | None = None,
) -> RowTerms:
    """The values of all terms, and the mixture's gradient with respect to the logits, written to `gradient_RV`.

    Without `labels_R` the argmax of the teacher's logits is the label. With `ce_gradient_RV` the gradient of CE alone,
    unweighted, goes there instead of into the mixture. Outputs are written last, so they may be the inputs' memory.
    """
    predicted_R = logits_RV.argmax(-1)
    if labels_R is None:
        assert teacher_RV is not None
        labels_R = teacher_RV.argmax(-1)
    labels_R1 = labels_R[:, None]
    logs_RV = torch.log_softmax(logits_RV, -1)
    shares_RV = logs_RV.exp()
    values = {"ce": -logs_RV.gather(1, labels_R1).squeeze(1)}
    mixed = _Gradient(shares_RV, is_wanted=gradient_RV is not None)
    _add_distances(terms, logits_RV, logs_RV, shares_RV, teacher_RV, values, mixed)
    if terms.cap > 0:
        _add_cap(terms.cap, logs_RV, shares_RV, predicted_R == labels_R, values, mixed)
    if gradient_RV is not None:
        ce = terms.ce
        if ce_gradient_RV is not None:
            _take_from_labels(ce_gradient_RV.copy_(shares_RV), labels_R1, 1.0)
            ce = 0.0
        mixed.add(ce)
        mixed.write(gradient_RV)
        _take_from_labels(gradient_RV, labels_R1, ce)
    return RowTerms(values, predicted_R, labels_R)


class _Gradient:
    """A gradient with respect to logits as `shares * (level + factors) - rest`, which every sum of terms has."""

    def __init__(self, shares_RV: Tensor, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self._shares_RV = shares_RV
        self._level: Tensor | float = 0.0  # or [R, 1]
        self._factors_RV: Tensor | None = None
        self._rest_RV: Tensor | None = None

    def add(self, level: Tensor | float, factors_RV: Tensor | None = None, rest_RV: Tensor | None = None) -> None:
        """Takes over the memory of the tensors given."""
        self._level = self._level + level
        if factors_RV is not None:
            self._factors_RV = factors_RV if self._factors_RV is None else self._factors_RV.add_(factors_RV)
        if rest_RV is not None:
            assert self._rest_RV is None
            self._rest_RV = rest_RV

    def write(self, out_RV: Tensor) -> None:
        scales = self._level if self._factors_RV is None else self._factors_RV.add_(self._level)
        torch.mul(self._shares_RV, scales, out=out_RV)
        if self._rest_RV is not None:
            out_RV.sub_(self._rest_RV)


def _add_distances(
    terms: Terms,
    logits_RV: Tensor,
    logs_RV: Tensor,
    shares_RV: Tensor,
    teacher_RV: Tensor | None,
    values: dict[str, Tensor],
    mixed: _Gradient,
) -> None:
    """KL and TV to the teacher's distribution; at temperature 1 both use the same shares of it."""
    if not terms.needs_teacher:
        return
    assert teacher_RV is not None
    temperature, teacher_shares_RV = terms.kl_temperature, None
    if terms.kl > 0 and temperature == 1.0:
        values["kl"], teacher_shares_RV = _divergence(teacher_RV, logs_RV)
    elif terms.kl > 0:
        soft_logs_RV = torch.log_softmax(logits_RV / temperature, -1)
        values["kl"], soft_teacher_RV = _divergence(teacher_RV / temperature, soft_logs_RV)
        if mixed.is_wanted:
            # The chain rule through s / T leaves one factor of 1 / T.
            mixed.add(0.0, rest_RV=soft_teacher_RV.sub_(soft_logs_RV.exp_()).mul_(terms.kl / temperature))
    if terms.tv > 0:
        if teacher_shares_RV is None:
            # By the same steps as the drafter's, so that equal logits give equal shares.
            teacher_shares_RV = torch.log_softmax(teacher_RV, -1).exp_()
        # Both sum to one, so 1 - sum min(s, t) = sum |t - s| / 2, which does not cancel where they are close.
        signs_RV = teacher_shares_RV - shares_RV
        values["tv"] = signs_RV.abs().sum(-1).div_(2)
        if mixed.is_wanted:
            # At a tie the sign is 0, between its neighbours, as in the gradient of torch.minimum.
            signs_RV.sign_()
            balance_R1 = (shares_RV * signs_RV).sum(-1, keepdim=True)
            mixed.add(balance_R1.mul_(terms.tv / 2), signs_RV.mul_(-terms.tv / 2))
    if terms.kl > 0 and temperature == 1.0 and mixed.is_wanted:
        mixed.add(terms.kl, rest_RV=teacher_shares_RV.mul_(terms.kl))


def _divergence(teacher_RV: Tensor, logs_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Forward KL [R] to the distribution with these logarithms, and the teacher's shares [R, V]."""
    differences_RV = torch.log_softmax(teacher_RV, -1)
    teacher_shares_RV = differences_RV.exp()
    return differences_RV.sub_(logs_RV).mul_(teacher_shares_RV).sum(-1), teacher_shares_RV


def _add_cap(
    weight: float, logs_RV: Tensor, shares_RV: Tensor, right_R: Tensor, values: dict[str, Tensor], mixed: _Gradient
) -> None:
    """CAP and the entropies it is made of; uses up `logs_RV`."""
    entropy_R = -(shares_RV * logs_RV).sum(-1)
    values["cap"], values["entropy"] = entropy_R * right_R, entropy_R
    if mixed.is_wanted:
        # dH / ds_i = -s_i (log s_i + H)
        weights_R1 = (right_R.to(logs_RV.dtype) * -weight)[:, None]
        mixed.add(weights_R1 * entropy_R[:, None], logs_RV.mul_(weights_R1))


def _take_from_labels(gradient_RV: Tensor, labels_R1: Tensor, amount: float) -> None:
    if amount:
        gradient_RV.scatter_(1, labels_R1, gradient_RV.gather(1, labels_R1) - amount)

"""Break the library on purpose: each mistake is caught by the law named beside it.

A law that lets its mutant live is a test that cannot fail.
"""

import pytest
import test_powersgd
import torch

import laws
from rtopk import (
    Codec,
    ErrorFeedback,
    MomentumCorrection,
    SparseVector,
    TopK,
    kernels,
    memory,
)
from rtopk.select import age, dealt, family
from rtopk.studies.train import powersgd


def with_replacement(candidates, r, words, k, *rest):
    """Pick positions that repeat."""
    picked = ORIGINAL_PICK(candidates, r, words, k, *rest)
    return picked._replace(positions=picked.positions[torch.arange(k) // 2])


def one_too_many(vector, k, r, *rest):
    """Consider r + 1 entries."""
    return ORIGINAL_CHOOSE(vector, k, min(r + 1, vector.numel()), *rest)


def zero_what_was_sent(self, sent):
    """Forget the residual of a sent entry instead of subtracting what was decoded."""
    self.residual[sent.indices] = 0.0


def subtract_without_masking(self, sent):
    """Leave the velocity of sent entries as it is."""
    self.residual[sent.indices] -= sent.values


def own_deal(self, seed, node):
    """Let every node shuffle for itself."""
    return dealt.Share(self, seed + node, node)


def same_deal(self, positions, seed, step):
    """Deal once and for all rounds."""
    return ORIGINAL_OWNER(self, positions, seed, 0)


def note_what_was_chosen(self, vector, k, rng):
    """Count an entry as sent when it is chosen."""
    chosen = ORIGINAL_AGES(self, vector, k, rng)
    self.last[chosen] = self.step + 1
    return chosen


def cold_start(self, left, payloads, weights=None):
    """Begin every round of PowerSGD with the right factors of the first."""
    right = self.right
    mean = ORIGINAL_FINISH(self, left, payloads, weights)
    self.right = right
    return mean


def not_orthonormal(self, payloads, weights=None):
    """Take the left factors as they come."""
    shapes = {name: (rows, self.matrix_rank) for name, (rows, _) in self.matrices.items()}
    return self._mean(payloads, shapes, weights)


ORIGINAL_FINISH = powersgd.LowRank.finish
ORIGINAL_OWNER = dealt.Dealt.owner
ORIGINAL_AGES = age.Ages.select
ORIGINAL_PICK = kernels.pick
ORIGINAL_CHOOSE = family._pick

MUTANTS = {
    "sampling with replacement": (
        (kernels, "pick", with_replacement),
        laws.draws_without_replacement,
    ),
    "off-by-one r": (
        (family, "_pick", one_too_many),
        laws.draws_without_replacement,
    ),
    "zeroing what was sent instead of subtracting what was decoded": (
        (memory.ErrorFeedback, "subtract", zero_what_was_sent),
        laws.quantisation_error_stays,
    ),
    "unmasked velocity": (
        (memory.MomentumCorrection, "subtract", subtract_without_masking),
        laws.masked_velocity_is_forgotten,
    ),
    "a deal of each node's own": (
        (dealt.Dealt, "at_node", own_deal),
        laws.nobody_is_dealt_the_same,
    ),
    "the same deal in every round": (
        (dealt.Dealt, "owner", same_deal),
        laws.nobody_is_dealt_the_same,
    ),
    "ages of what was chosen instead of what was received": (
        (age.Ages, "select", note_what_was_chosen),
        laws.who_was_not_sent_waits_on,
    ),
    "PowerSGD without warm start": (
        (powersgd.LowRank, "finish", cold_start),
        test_powersgd.test_warm_start_closes_in_on_the_best_rank_1,
    ),
    "PowerSGD without orthonormal factors": (
        (powersgd.LowRank, "agree", not_orthonormal),
        lambda: test_powersgd.test_equals_the_algorithm_of_the_paper(rank=1),
    ),
    "residual never subtracted": (
        (memory.ErrorFeedback, "subtract", lambda self, sent: None),
        lambda: laws.nothing_lost(TopK(), ErrorFeedback(), Codec()),
    ),
    "unmasked velocity loses mass against the masked law": (
        (memory.MomentumCorrection, "subtract", subtract_without_masking),
        lambda: laws.nothing_lost(TopK(), MomentumCorrection(), Codec()),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    (owner, attribute, broken), law = MUTANTS[name]
    law()  # holds for the library as it is
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises((AssertionError, IndexError)):
        law()


def test_subtracting_what_was_chosen_is_caught(monkeypatch):
    """Taking out the chosen values instead of the decoded ones loses what the codec rounded away."""
    decoded = Codec.encode_with_decoded

    def chosen_instead(self, vector, rng=None):
        return decoded(self, vector, rng)[0], vector

    def coarse(self, vector, rng=None):
        payload, _ = decoded(self, SparseVector(vector.indices, vector.values.round(), vector.size), rng)
        return payload, vector

    monkeypatch.setattr(Codec, "encode_with_decoded", chosen_instead)
    laws.nothing_lost(TopK(), ErrorFeedback(), Codec())  # no difference while nothing is rounded
    monkeypatch.setattr(Codec, "encode_with_decoded", coarse)
    with pytest.raises(AssertionError):
        laws.nothing_lost(TopK(), ErrorFeedback(), Codec())

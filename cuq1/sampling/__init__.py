"""Sampling: random numbers, filters, rejection sampling and the draft-depth rule."""

from cuq1.sampling.filter import Distribution, filtered
from cuq1.sampling.params import MAX_DRAFTS, MIN_AUTO_DRAFTS, DecodeParams
from cuq1.sampling.rng import Purpose, fresh_seed, philox4x32, uniform
from cuq1.sampling.rounds import DecodeStream, FinishReason, Round
from cuq1.sampling.speculative import Verdict, accept, draw, residual, verify

__all__ = [
    "MAX_DRAFTS",
    "MIN_AUTO_DRAFTS",
    "DecodeParams",
    "DecodeStream",
    "Distribution",
    "FinishReason",
    "Purpose",
    "Round",
    "Verdict",
    "accept",
    "draw",
    "filtered",
    "fresh_seed",
    "philox4x32",
    "residual",
    "uniform",
    "verify",
]

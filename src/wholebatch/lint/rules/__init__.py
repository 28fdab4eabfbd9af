"""All rules, in the order of their codes."""

from __future__ import annotations

from . import wb101_undivided_loss as wb101
from . import wb102_loss_divided_twice as wb102
from . import wb103_mean_of_token_means as wb103
from . import wb104_cleared_every_micro_batch as wb104
from . import wb105_clipped_every_micro_batch as wb105
from . import wb106_clipped_before_unscale as wb106
from . import wb107_scheduler_every_micro_batch as wb107
from . import wb108_scaler_inside_window as wb108
from . import wb109_short_last_window as wb109
from . import wb110_boundary_off_by_one as wb110
from . import wb111_ddp_sync_every_micro_batch as wb111
from . import wb112_sharded_no_sync as wb112
from . import wb113_batchnorm as wb113
from . import wb114_contrastive_loss as wb114
from . import wb115_reported_loss as wb115
from . import wb116_micro_batches_counted as wb116
from . import wb117_cleared_before_step as wb117
from . import wb118_batch_would_fit as wb118
from .rule_base import Rule

__all__ = ["RULES", "Rule", "rule"]

RULES: tuple[Rule, ...] = (
    wb101.RULE,
    wb102.RULE,
    wb103.RULE,
    wb104.RULE,
    wb105.RULE,
    wb106.RULE,
    wb107.RULE,
    wb108.RULE,
    wb109.RULE,
    wb110.RULE,
    wb111.RULE,
    wb112.RULE,
    wb113.RULE,
    wb114.RULE,
    wb115.RULE,
    wb116.RULE,
    wb117.RULE,
    wb118.RULE,
)


def rule(code: str) -> Rule | None:
    """Return the rule with this code, or None."""
    return next((r for r in RULES if r.code == code.upper()), None)

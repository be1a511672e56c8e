"""The weight that every loss term has in a backward, read off the autograd graph.

The torch side of the doctor: imported only once the script itself has imported torch.
"""

from __future__ import annotations

from gradaccum.doctor.ledger.read import read as read

__all__ = ["read"]

"""One process per rank: the launcher that starts them, and the rendezvous where they meet."""

from cuq1.parallel.rendezvous import Rendezvous

__all__ = ["Rendezvous"]

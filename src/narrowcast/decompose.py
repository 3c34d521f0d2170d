"""Use finished decompositions from Python.

decomposed = nc.decompose.load("runs/stories")
tokens = decomposed.batch()
importances = decomposed.importances(tokens)
full, sparse = decomposed(tokens, masks=1.0), decomposed(tokens, masks=importances)
without = decomposed(tokens, off=["model.layers.2.mlp.up_proj:17"])
"""

from narrowcast.workloads.decompose.harvest import HarvestSettings as HarvestSettings
from narrowcast.workloads.decompose.harvest import harvest as harvest
from narrowcast.workloads.decompose.harvest import write_harvest as write_harvest
from narrowcast.workloads.decompose.loading import Decomposed as Decomposed
from narrowcast.workloads.decompose.loading import load as load

__all__ = ["Decomposed", "HarvestSettings", "harvest", "load", "write_harvest"]

import torch, math, sys
from gulliver.memory import Manager, DiskStore
from gulliver.parallel import ZeroOptimizer
from gulliver.comm import launch

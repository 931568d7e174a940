"""The costs of a step: gradients and updates between nodes, kernels, the optimizer's step, and the cost model."""

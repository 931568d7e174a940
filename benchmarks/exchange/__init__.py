"""What a step costs: gradients and updates between nodes, kernels, the optimizer's step, and the cost model."""

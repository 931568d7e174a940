"""Loss for bits: ways to train over slow links, tuned alike, on workers simulated in one process."""

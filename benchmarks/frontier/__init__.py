"""Loss against bits: training methods for slow links, equally tuned, on workers simulated in one process."""

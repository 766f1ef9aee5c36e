"""Starting and supervising processes: environment, rendezvous, local ranks, watch, graceful stop."""

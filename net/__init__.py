"""The socket layer: transport, collectives, planner, worker. Empty until the cluster is built."""

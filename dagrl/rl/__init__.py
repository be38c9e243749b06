"""The RL library: losses, advantages, rewards, environments and rollouts. It starts no Ray actors and replays no phases."""

"""What FedPG and S-FedPG share: the search for a step that lowers every loss."""

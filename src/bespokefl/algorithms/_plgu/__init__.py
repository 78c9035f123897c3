"""What PLGU's methods and its baseline FedSAM share: sharpness, layer by layer."""

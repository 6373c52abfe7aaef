"""Predictions beside the published sweep of SimpleTuner's examples, which is data here."""

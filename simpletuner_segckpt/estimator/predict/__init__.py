"""Any schedule of a profiled model: peak, time, the fastest that fits."""

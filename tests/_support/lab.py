"""Three unequal CPU devices so slow, beside links so quick, that the planner deals the work out."""

from hap.cluster import ClusterSpec

LAB = """
name: lab
backend: gloo
hosts:
  - name: all
    link: {bandwidth: 100GB/s, latency: 1ns}
    devices:
      - {name: quick, tflops: {float32: 0.005, float64: 0.005}, memory: 16GB, memory_bandwidth: 3GB/s, launch: 1ns}
      - {name: mid, tflops: {float32: 0.002, float64: 0.002}, memory: 8GB, memory_bandwidth: 1.2GB/s, launch: 1ns}
      - {name: slow, tflops: {float32: 0.001, float64: 0.001}, memory: 8GB, memory_bandwidth: 0.6GB/s, launch: 1ns}
"""


def lab() -> ClusterSpec:
    return ClusterSpec.from_yaml(LAB)

// In place of CUDA's runtime: what the project calls of it. Streams are threads, devices are numbers, device memory is
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "language.h"

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorCudartUnloading = 4,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901
};
using cudaStream_t = struct CpuStream*;
using cudaEvent_t = struct CpuEvent*;

const char* cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError();

// ---- devices
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrGPUDirectRDMAFlushWritesOptions = 117,
  cudaDevAttrGPUDirectRDMAWritesOrdering = 118
};
enum { cudaGPUDirectRDMAWritesOrderingAllDevices = 200 };
enum { cudaFlushGPUDirectRDMAWritesOptionHost = 1 };
enum cudaFlushGPUDirectRDMAWritesTarget { cudaFlushGPUDirectRDMAWritesTargetCurrentDevice };
enum cudaFlushGPUDirectRDMAWritesScope { cudaFlushGPUDirectRDMAWritesToAllDevices = 200 };
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest);
cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTarget target,
                                               cudaFlushGPUDirectRDMAWritesScope scope);

// ---- streams and events
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
using cudaGraph_t = struct CpuGraph*;
using cudaGraphNode_t = struct CpuGraphNode*;
struct cudaHostNodeParams {
  void (*fn)(void*);
  void* userData;
};
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph);
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* dependencies,
                                 size_t num_dependencies, const cudaHostNodeParams* params);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void*), void* argument);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

// ---- memory
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1 };
struct cudaMemcpyAttributes {
  cudaMemcpySrcAccessOrder srcAccessOrder;
};
cudaError_t cudaMalloc(void** p, size_t num_bytes);
cudaError_t cudaFree(void* p);
cudaError_t cudaHostAlloc(void** p, size_t num_bytes, unsigned flags);
cudaError_t cudaFreeHost(void* p);
cudaError_t cudaHostRegister(void* p, size_t num_bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* p);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
cudaError_t cudaMemset(void* to, int value, size_t num_bytes);
cudaError_t cudaMemsetAsync(void* to, int value, size_t num_bytes, cudaStream_t stream);
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* num_bytes, size_t count,
                                 cudaMemcpyAttributes* attributes, size_t* first_of, size_t num_attributes,
                                 cudaStream_t stream);
template <typename T>
cudaError_t cudaMalloc(T** p, size_t num_bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), num_bytes);
}

// ---- kernels
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int ptxVersion;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <typename T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T*) {
  attributes->sharedSizeBytes = 4096;  // nobody knows
  attributes->ptxVersion = gpu_on_cpu::kWarp == 32 ? 90 : 80;  // as tests/native/building.py compiles them
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaFuncSetAttribute(T*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

// ---- the driver's functions
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* result);

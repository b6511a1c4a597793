# The CUDA kernels inside the library: their source, for NVRTC, and where nvcc is at hand a fat binary made ahead of time.
# Sets GPUCOMM_FAT_BINARY (a file, empty if there is no nvcc) and the dependencies of embedded_kernels.cpp.

set(GPUCOMM_CUDA_KERNELS "AUTO" CACHE STRING "Compile the CUDA kernels ahead of time: AUTO (if there is an nvcc), ON, OFF (NVRTC at first use)")
set_property(CACHE GPUCOMM_CUDA_KERNELS PROPERTY STRINGS AUTO ON OFF)
set(GPUCOMM_CUDA_ARCHITECTURES "" CACHE STRING "Of the fat binary, like '80;90'; empty: those of 80, 90 and 100 that nvcc knows")

set(GPUCOMM_FAT_BINARY "${CMAKE_CURRENT_BINARY_DIR}/codec.fatbin")
set(kernels_source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/codec.cu")
set(kernels_header "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/codec_args.h")

if(NOT GPUCOMM_CUDA_KERNELS MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GPUCOMM_CUDA_KERNELS is '${GPUCOMM_CUDA_KERNELS}': AUTO, ON or OFF")
endif()
if(NOT GPUCOMM_CUDA_KERNELS STREQUAL "OFF")
  find_program(GPUCOMM_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin
    DOC "The CUDA compiler, for the fat binary of the kernels")
endif()
if(GPUCOMM_CUDA_KERNELS STREQUAL "ON" AND NOT GPUCOMM_NVCC)
  message(FATAL_ERROR "GPUCOMM_CUDA_KERNELS is ON, but there is no nvcc: put it on PATH, or set CUDA_HOME or GPUCOMM_NVCC")
endif()

if(GPUCOMM_NVCC AND NOT GPUCOMM_CUDA_KERNELS STREQUAL "OFF")
  set(architectures ${GPUCOMM_CUDA_ARCHITECTURES})
  if(NOT architectures)
    execute_process(COMMAND ${GPUCOMM_NVCC} --list-gpu-code OUTPUT_VARIABLE known_codes COMMAND_ERROR_IS_FATAL ANY)
    foreach(architecture 80 90 100)
      if(known_codes MATCHES "sm_${architecture}\n")
        list(APPEND architectures ${architecture})
      endif()
    endforeach()
  endif()
  set(targets)
  foreach(architecture ${architectures})
    list(APPEND targets -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  # For what is newer than all of them, the driver compiles the oldest one's PTX.
  list(GET architectures 0 oldest)
  list(APPEND targets -gencode arch=compute_${oldest},code=compute_${oldest})
  set(nvcc_compiler)
  if(NOT CMAKE_CROSSCOMPILING)
    set(nvcc_compiler -ccbin ${CMAKE_CXX_COMPILER} -allow-unsupported-compiler)
  endif()
  add_custom_command(OUTPUT ${GPUCOMM_FAT_BINARY}
    COMMAND ${GPUCOMM_NVCC} -std=c++17 -fatbin ${nvcc_compiler} ${targets} -o ${GPUCOMM_FAT_BINARY} ${kernels_source}
    DEPENDS ${kernels_source} ${kernels_header}
    COMMENT "Compiling the CUDA kernels for ${architectures}" VERBATIM)
  message(STATUS "CUDA kernels: ahead of time for ${architectures} by ${GPUCOMM_NVCC}")
else()
  file(GENERATE OUTPUT ${GPUCOMM_FAT_BINARY} CONTENT "")
  message(STATUS "CUDA kernels: by NVRTC at first use")
endif()

set_source_files_properties(csrc/cuda/embedded_kernels.cpp PROPERTIES
  OBJECT_DEPENDS "${GPUCOMM_FAT_BINARY};${kernels_source};${kernels_header}"
  COMPILE_DEFINITIONS "GPUCOMM_FAT_BINARY=\"${GPUCOMM_FAT_BINARY}\";GPUCOMM_KERNELS_SOURCE=\"${kernels_source}\";GPUCOMM_KERNELS_HEADER=\"${kernels_header}\"")

# libfake_nccl_<version>.so, which tests put in the place of libnccl.so.2: the same code for every version, but the
# functions that are younger than it are not exported. libfake_nccl.so, which C++ tests link against to control it, is one
# of the versions that torch brings.
set(fake_nccl_versions 21805 21903 22105 22509 22703 22809 23007 23203)
set(fake_nccl_usual 22809)

file(GLOB fake_nccl_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/*.cpp")
list(FILTER fake_nccl_sources EXCLUDE REGEX "/version\\.cpp$")
add_library(fake_nccl_code OBJECT ${fake_nccl_sources})
target_include_directories(fake_nccl_code PRIVATE "${tests}" "${csrc}")
target_compile_options(fake_nccl_code PRIVATE -O1 -g1 -ffp-contract=off)
target_link_libraries(fake_nccl_code PRIVATE gpucomm_options)
# One file costs less to compile than the standard library's headers that it includes.
set_target_properties(fake_nccl_code PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10 CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  POSITION_INDEPENDENT_CODE ON)

# Which version a function came with is said once, in the table that it is called by.
set(nccl_table "${csrc}/nccl/nccl_api.h")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${nccl_table}")
file(READ "${nccl_table}" nccl_functions)
string(REGEX MATCHALL "F\\([a-z_]+, nccl[A-Za-z]+, [0-9]+," nccl_functions "${nccl_functions}")

function(add_fake_nccl name version)
  set(exported "fake_nccl_*;")
  foreach(entry IN LISTS nccl_functions)
    string(REGEX REPLACE "F\\([a-z_]+, (nccl[A-Za-z]+), ([0-9]+)," "\\1;\\2" symbol_and_since "${entry}")
    list(GET symbol_and_since 0 symbol)
    list(GET symbol_and_since 1 since)
    if(NOT since GREATER version)
      string(APPEND exported " ${symbol};")
    endif()
  endforeach()
  set(script "${CMAKE_CURRENT_BINARY_DIR}/${name}.map")
  file(CONFIGURE OUTPUT "${script}" CONTENT "{ global: ${exported} local: *; };\n")
  add_library(${name} SHARED "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/version.cpp")
  target_include_directories(${name} PRIVATE "${tests}" "${csrc}" INTERFACE "${tests}")
  target_compile_definitions(${name} PRIVATE FAKE_NCCL_VERSION=${version})
  target_link_libraries(${name} PRIVATE fake_nccl_code gpucomm_options fake_cuda)
  target_link_options(${name} PRIVATE -Wl,-z,defs "-Wl,--version-script=${script}")
  set_target_properties(${name} PROPERTIES LINK_DEPENDS "${script}" POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden BUILD_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN ON)
endfunction()

foreach(version IN LISTS fake_nccl_versions)
  add_fake_nccl(fake_nccl_${version} ${version})
  # The loader knows NCCL by this name, whatever file it came from.
  set_target_properties(fake_nccl_${version} PROPERTIES NO_SONAME ON)
  target_link_options(fake_nccl_${version} PRIVATE -Wl,-soname,libnccl.so.2)
endforeach()
add_fake_nccl(fake_nccl ${fake_nccl_usual})

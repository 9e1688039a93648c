//! The OCI image: `scratch` with the server and `bosh-dns-sync`, as an image layout in a tar (OCI
//! Image Format Specification 1.1, image-layout.md). `podman load`, `skopeo copy oci-archive:` and
//! `docker load` accept it.

use std::{fs, path::Path};

use anyhow::Result;
use serde_json::{Value, json};

use super::{Release, archive};

pub(super) fn write(release: &Release, server: &Path, sync: &Path) -> Result<()> {
    let layer_files = release.staging("layer")?;
    archive::copy(server, &layer_files.join("bosh-dns-xdp"), 0o755)?;
    archive::copy(sync, &layer_files.join("bosh-dns-sync"), 0o755)?;
    let image = release.staging("image")?;
    fs::create_dir_all(image.join("blobs/sha256"))?;
    let layer_tar = image.join("layer");
    archive::tar(release, &layer_files, &layer_tar)?;
    let layer = keep(&image, &layer_tar, "application/vnd.oci.image.layer.v1.tar")?;
    let labels = json!({
        "org.opencontainers.image.title": "bosh-dns-xdp",
        "org.opencontainers.image.version": release.version,
        "org.opencontainers.image.revision": release.commit,
        "org.opencontainers.image.licenses": "Apache-2.0",
    });
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": ["/bosh-dns-xdp"],
            "Cmd": ["run", "--config", "/etc/bosh-dns-xdp/config.json"],
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    });
    let config = keep_json(&image, &config, "application/vnd.oci.image.config.v1+json")?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [layer],
    });
    let mut manifest = keep_json(&image, &manifest, "application/vnd.oci.image.manifest.v1+json")?;
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "bosh-dns-xdp:latest"});
    archive::put(
        &image.join("index.json"),
        json!({"schemaVersion": 2, "manifests": [manifest]}).to_string(),
        0o644,
    )?;
    archive::put(&image.join("oci-layout"), json!({"imageLayoutVersion": "1.0.0"}).to_string(), 0o644)?;
    let name = format!("bosh-dns-xdp-{}-oci.tar", release.version);
    archive::tar(release, &image, &release.out.join(name))
}

/// Stores a JSON document as a blob; returns its descriptor.
fn keep_json(image: &Path, document: &Value, media_type: &str) -> Result<Value> {
    let file = image.join("document");
    archive::put(&file, document.to_string(), 0o644)?;
    keep(image, &file, media_type)
}

/// Moves a file into the blobs; returns its descriptor.
fn keep(image: &Path, file: &Path, media_type: &str) -> Result<Value> {
    let digest = archive::sha256(file)?;
    let size = fs::metadata(file)?.len();
    fs::rename(file, image.join("blobs/sha256").join(&digest))?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size}))
}
